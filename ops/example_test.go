package ops_test

import (
	"fmt"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func Example() {
	x, err := dlpack.FromFloat64s(dlpack.Float32, []float64{0, 0, 0, 0, 10000, 10000, -1, -1}, 2, 4)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := (ops.SoftmaxForward{X: x, Y: x}).Run(nil); err != nil { // in place
		fmt.Println(err)
		return
	}
	y, err := x.Float64s()
	fmt.Println(y, err)
	// Output: [0.25 0.25 0.25 0.25 0.5 0.5 0 0] <nil>
}
