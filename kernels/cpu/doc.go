// Package cpu runs the ops on host memory, in parallel over rows. It computes float16, bfloat16 and float32
// input in float32, and adds up sums in float64. It computes float64 input in float64. Results have the same
// bits on every run and for every number of workers, but not on every instruction set.
package cpu
