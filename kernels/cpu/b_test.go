package cpu

import (
	"testing"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

func BenchmarkRow(b *testing.B) {
	for _, n := range []int{16, 1024} {
		m := 4096
		h := make([]uint16, m*n)
		d := make([]uint16, m*n)
		for i := range h {
			h[i] = 0x3f80 + uint16(i*7919%64)
		}
		tg := make([]int64, m)
		loss := make([]float32, m)
		mx := make([]float32, m)
		ls := make([]float32, m)
		x := kernels.Matrix{Data: unsafe.Pointer(&h[0]), DType: 1, Rows: int64(m), Cols: int64(n), Stride: int64(n)}
		y := x
		y.Data = unsafe.Pointer(&d[0])
		v := func(p unsafe.Pointer, t kernels.DType) kernels.Vector {
			return kernels.Vector{Data: p, DType: t, Len: int64(m), Stride: 1}
		}
		f := func(s string, g func()) {
			b.Run(s, func(b *testing.B) {
				for b.Loop() {
					g()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*m), "ns/row")
			})
		}
		f("softmax", func() { SoftmaxForward(x, y, 1) })
		f("softmaxb", func() { SoftmaxBackward(x, x, y, 1) })
		ce := kernels.CrossEntropy{X: x, Target: v(unsafe.Pointer(&tg[0]), kernels.Int64), IgnoreIndex: -100, Loss: v(unsafe.Pointer(&loss[0]), 2), Max: v(unsafe.Pointer(&mx[0]), 2), LogSum: v(unsafe.Pointer(&ls[0]), 2)}
		f("ce", func() { CrossEntropyForward(&ce, 1) })
		ce2 := ce
		ce2.DX = y
		ce2.DLoss = ce.Loss
		f("ceb", func() { CrossEntropyBackward(&ce2, 1) })
	}
}
