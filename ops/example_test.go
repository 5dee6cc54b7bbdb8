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

// An option that is not set has its default: ignore_index is -100. Some sets it, here to class 0.
func ExampleSome() {
	x, _ := dlpack.FromFloat64s(dlpack.Float64, []float64{0, 0, 0, 0}, 2, 2)
	target, _ := dlpack.FromFloat64s(dlpack.Int64, []float64{0, 1}, 2)
	loss, _ := dlpack.New(dlpack.Float64, 2)
	for _, ignored := range []ops.Optional[int64]{{}, ops.Some[int64](0)} {
		err := ops.CrossEntropyForward{X: x, Target: target, Loss: loss, IgnoreIndex: ignored}.Run(nil)
		losses, _ := loss.Float64s()
		fmt.Printf("%.3f %v\n", losses, err)
	}
	// Output:
	// [0.693 0.693] <nil>
	// [0.000 0.693] <nil>
}
