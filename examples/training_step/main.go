// Command training_step trains a classifier with RMSNorm and cross-entropy, in host memory. In a checkout:
//
//	go run ./examples/training_step
package main

import (
	"fmt"
	"math"
	"math/rand"
	"os"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

const rows, features, classes, steps, rate = 256, 16, 10, 30, 1

// array is a matrix, and the tensor that shares its memory.
type array struct {
	values []float32
	tensor *dlpack.Tensor
}

func newArray(shape ...int64) array {
	size := int64(1)
	for _, n := range shape {
		size *= n
	}
	values := make([]float32, size)
	tensor, err := dlpack.FromSlice(values, shape...)
	stopOn(err)
	return array{values, tensor}
}

// row is row i of a matrix with columns for the features.
func (a array) row(i int) []float32 { return a.values[i*features : (i+1)*features] }

func dot(a, b []float32) (sum float32) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

func main() {
	// The class of a row is the largest of random linear functions of it, so that it can be learned.
	random := rand.New(rand.NewSource(0))
	x, truth := newArray(rows, features), newArray(classes, features)
	for _, a := range []array{x, truth} {
		for i := range a.values {
			a.values[i] = float32(random.NormFloat64())
		}
	}
	labels := make([]int64, rows)
	for i := range rows {
		for c := range classes {
			if dot(x.row(i), truth.row(c)) > dot(x.row(i), truth.row(int(labels[i]))) {
				labels[i] = int64(c)
			}
		}
	}
	target, err := dlpack.FromSlice(labels)
	stopOn(err)

	scale, head := newArray(features), newArray(classes, features)
	for i := range scale.values {
		scale.values[i] = 1
	}
	hidden, rstd, logits, loss := newArray(rows, features), newArray(rows), newArray(rows, classes), newArray()
	dhidden, dscale := newArray(rows, features), newArray(features)
	norm := ops.RMSNormForward{X: x.tensor, Weight: scale.tensor, Y: hidden.tensor, Rstd: rstd.tensor}
	// One pass computes the loss and writes its gradient over the logits, which nothing reads after it.
	criterion := ops.CrossEntropyForward{X: logits.tensor, Target: target, Loss: loss.tensor, DX: logits.tensor,
		Reduction: ops.ReduceMean, OnePass: true}
	// The operator always computes dx. x is data, so it may go over the upstream gradient.
	gradient := ops.RMSNormBackward{X: x.tensor, Weight: scale.tensor, DOut: dhidden.tensor, Rstd: rstd.tensor,
		DX: dhidden.tensor, DW: dscale.tensor}

	var first float32
	for step := range steps {
		stopOn(norm.Run(nil))
		for i := range rows { // logits = hidden head'
			for c := range classes {
				logits.values[i*classes+c] = dot(hidden.row(i), head.row(c))
			}
		}
		stopOn(criterion.Run(nil))

		dhead := newArray(classes, features)
		clear(dhidden.values)
		for i := range rows { // dhidden = dlogits head, dhead = dlogits' hidden
			for c := range classes {
				d := logits.values[i*classes+c]
				for f := range features {
					dhidden.row(i)[f] += d * head.row(c)[f]
					dhead.row(c)[f] += d * hidden.row(i)[f]
				}
			}
		}
		stopOn(gradient.Run(nil))
		for i, d := range dhead.values {
			head.values[i] -= rate * d
		}
		for i, d := range dscale.values {
			scale.values[i] -= rate * d
		}
		if step == 0 {
			first = loss.values[0]
		}
		if step%10 == 0 || step == steps-1 {
			fmt.Printf("step %2d: loss %.4f\n", step, loss.values[0])
		}
	}
	// The head is 0 in the first step, so all classes are equally probable.
	if !(math.Abs(float64(first)-math.Log(classes)) < 1e-5 && loss.values[0] < first/3) {
		stopOn(fmt.Errorf("the first loss is %v, expected %v, and a third of it at the end", first,
			math.Log(classes)))
	}
}

func stopOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "training_step:", err)
		os.Exit(1)
	}
}
