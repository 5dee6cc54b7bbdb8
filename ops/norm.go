package ops

import "github.com/gander-go/gander/kernels"

type normCall struct {
	kernels.Norm
	Choice
}
