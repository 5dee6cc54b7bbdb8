// Package cpu runs the ops on host memory, parallel over rows. float16, bfloat16 and float32 input is computed in
// float32 and summed in float64; float64 input is float64 throughout. The order is always the same, so that results are
// the same bits on every run and for every number of workers (but not for every instruction set).
package cpu
