// Package headers stops a build with the tag cuda that does not find CUDA's headers. It says how to get them.
//
// Package driver imports it beside gorgonia.org/cu, which would only say that there is no cuda.h. It is a
// package of its own because Go compiles nothing that imports gorgonia.org/cu after that has failed.
package headers
