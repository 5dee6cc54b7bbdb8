//go:build cuda && cgo && linux && amd64

package headers

/*
#if !__has_include(<cuda.h>)
#error found no cuda.h: run eval "$(go run github.com/gander-go/gander/cmd/cudaenv)" in this shell
#else
#include <cuda.h>
#if CUDA_VERSION != 11080
#error cuda.h is not of CUDA 11.8: run eval "$(go run github.com/gander-go/gander/cmd/cudaenv)" in this shell
#endif
#endif
*/
import "C"
