package operators

// What all groups have.
var (
	algorithm = Option{Name: "algorithm", Type: Algorithm,
		Doc: "how a GPU goes over the rows"}
	batchInvariant = Option{Name: "batch_invariant", Type: Flag,
		Doc: "a row's bits do not depend on how many rows there are"}
)

// Operands that several operators have.
var (
	x      = Operand{Name: "x", Shape: Rows, DType: Float}
	weight = Operand{Name: "weight", Shape: Columns, DType: Companion, Optional: true}
	target = Operand{Name: "target", Shape: Strided, DType: Index}
)

// Table is all operators, in the order of gander.h.
var Table = []Group{
	{
		Name: "softmax", Type: "Softmax",
		Options: []Option{algorithm, batchInvariant},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_softmax",
				Doc: "y[i] = exp(x[i] - max x) / sum exp(x - max x) for each row.",
				Operands: []Operand{
					x,
					{Name: "y", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}},
				},
				Torch: []Torch{
					{Name: "softmax", Results: []string{"y"}, Saving: "softmax", Backward: []string{"softmax_bwd"}},
				},
			},
			{
				Name: "backward", Owned: "gander_softmax_grad",
				Doc: "dx = (dy - sum(dy * y)) * y for each row.",
				Operands: []Operand{
					{Name: "dy", Shape: Rows, DType: Float, Gradient: "y"},
					{Name: "y", Shape: Rows, DType: Same, Like: "dy"},
					{Name: "dx", Shape: Rows, DType: Same, Like: "dy", Output: true, Over: []string{"dy", "y"}, Gradient: "x"},
				},
				Torch: []Torch{{Name: "softmax_bwd", Results: []string{"dx"}}},
			},
		},
	},
	{
		Name: "rmsnorm", Type: "RMSNorm",
		Options: []Option{
			{Name: "eps", Type: Real, Default: 1e-6, Device: true, Doc: "added to the mean of squares; backward does not use it"},
			algorithm, batchInvariant,
			{Name: "weight_offset", Type: Real, Device: true, Doc: "added to each weight; needs a weight"},
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_rmsnorm", Refuses: true,
				Doc: "y = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) for each row (Zhang and Sennrich, \"Root Mean " +
					"Square Layer Normalization\", 2019).",
				Operands: []Operand{
					x, weight,
					{Name: "y", Shape: Rows, DType: Companion, Output: true, Over: []string{"x"}, Choice: "out_dtype"},
					{Name: "rstd", Shape: PerRow, DType: Statistic, Output: true, Optional: true},
				},
				Torch: []Torch{
					{Name: "rmsnorm", Results: []string{"y"}, Saving: "rmsnorm_fwd",
						Backward: []string{"rmsnorm_bwd_dw", "rmsnorm_bwd"}},
					{Name: "rmsnorm_fwd", Results: []string{"y", "rstd"}, Saving: "rmsnorm_fwd",
						Backward: []string{"rmsnorm_bwd_dw", "rmsnorm_bwd"}},
				},
			},
			{
				Name: "backward", Owned: "gander_rmsnorm_grad", Refuses: true,
				Doc: "With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd for each row, and dw = the sum over " +
					"rows of dout * h, accumulated in float32 or wider in a fixed order.",
				Operands: []Operand{
					x, weight,
					{Name: "dout", Shape: Rows, DType: Companion, Gradient: "y"},
					{Name: "rstd", Shape: PerRow, DType: Statistic},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"dout"}, Gradient: "x"},
					{Name: "dw", Shape: Columns, DType: Same, Like: "weight", Output: true, Optional: true, Needs: "weight",
						Gradient: "weight"},
				},
				Torch: []Torch{
					{Name: "rmsnorm_bwd", Results: []string{"dx"}, Without: []string{"eps"}},
					{Name: "rmsnorm_bwd_dw", Results: []string{"dx", "dw"}, Without: []string{"eps"}, Must: []string{"weight"}},
				},
			},
		},
	},
	{
		Name: "cross_entropy", Type: "CrossEntropy",
		Options: []Option{
			{Name: "ignore_index", Type: Integer, Default: -100, Doc: "rows with this target count for nothing"},
			{Name: "reduction", Type: Reduction, Torch: 1, Doc: "what becomes of the rows' losses"},
			{Name: "one_pass", Type: Flag,
				Doc: "forward and backward share one pass over x. Forward's dx is then the gradient of the reduced loss (over the " +
					"denominator with a mean); backward is given that dx, apart from x, and makes it again only where dloss, a single " +
					"element, is not 1: it looks on the device, nothing synchronises. Not with reduction none"},
			batchInvariant,
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_cross_entropy", Refuses: true,
				Doc: "loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the row's log-sum-exp; the loss of each row, " +
					"their sum, or the sum over the sum of the counted rows' weights (NaN where no row counts). A row whose target is " +
					"ignore_index, or whose class has weight 0, counts for nothing: its loss is 0 and its gradient 0. A target outside " +
					"[0, N) is never read with: that row's loss and gradient are NaN, and with a mean those of all rows. dx, in the " +
					"same pass over x: weight[t] * (softmax(x) - onehot(t)), the gradient of the sum of the losses. denominator: the mean's, written with any " +
					"reduction.",
				Operands: []Operand{
					x, target, weight,
					{Name: "loss", Shape: Reduced, DType: Statistic, Output: true},
					{Name: "lse", Shape: Statistics, DType: Statistic, Output: true, Optional: true},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Optional: true, Over: []string{"x"}},
					{Name: "denominator", Shape: One, DType: Statistic, Output: true, Optional: true},
				},
				Torch: []Torch{
					{Name: "cross_entropy", Results: []string{"loss"}, Fixed: map[string]float64{"one_pass": 0},
						Extra: []Option{
							{Name: "inplace_backward", Type: Flag, Doc: "backward writes the gradient over x"},
							{Name: "one_pass", Type: Flag, Torch: -1, Doc: "whether forward makes the gradient too; by x's size if None"},
						},
						Saving: "cross_entropy_fwd", Backward: []string{"cross_entropy_bwd"}},
					{Name: "cross_entropy_fwd", Results: []string{"loss", "lse"}, Packed: true,
						Fixed: map[string]float64{"one_pass": 0}, Saving: "cross_entropy_fwd",
						Backward: []string{"cross_entropy_bwd"}},
					{Name: "cross_entropy_fwd_lse", Results: []string{"loss", "lse"},
						Fixed: map[string]float64{"one_pass": 0, "reduction": 0}},
					{Name: "cross_entropy_fwd_dx", Results: []string{"loss", "lse", "dx"},
						Fixed: map[string]float64{"one_pass": 0, "reduction": 0}},
					{Name: "cross_entropy_fwd_dx_", Results: []string{"loss", "lse"}, Writes: "x", Into: "dx",
						Fixed: map[string]float64{"one_pass": 0, "reduction": 0}},
					{Name: "cross_entropy_fwd_one_pass", Results: []string{"loss", "lse", "dx"}, Packed: true,
						Fixed: map[string]float64{"one_pass": 1}},
				},
			},
			{
				Name: "backward", Owned: "gander_cross_entropy_grad", Refuses: true,
				Doc: "dx = dloss * weight[t] * (softmax(x) - onehot(t)), over the denominator with a mean, for which denominator or a " +
					"lse that contains it is required; denominator must be NULL otherwise. lse: as forward wrote it, best in two parts, " +
					"since their sum loses digits where logits are large.",
				Operands: []Operand{
					x, target, weight,
					{Name: "dloss", Shape: Upstream, DType: Statistic, Gradient: "loss"},
					{Name: "lse", Shape: Statistics, DType: Statistic},
					{Name: "denominator", Shape: One, DType: Statistic, Optional: true},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}, Read: "one_pass",
						Gradient: "x"},
				},
				Torch: []Torch{
					{Name: "cross_entropy_bwd", Results: []string{"dx"}, Without: []string{"denominator"},
						Fixed: map[string]float64{"one_pass": 0}},
					{Name: "cross_entropy_bwd_", Writes: "x", Into: "dx", Without: []string{"denominator"},
						Fixed: map[string]float64{"one_pass": 0}},
					{Name: "cross_entropy_bwd_one_pass", Writes: "dx", Into: "dx", Without: []string{"denominator"},
						Fixed: map[string]float64{"one_pass": 1}},
				},
			},
		},
	},
	{
		Name: "logsumexp", Type: "LogSumExp",
		Options: []Option{batchInvariant},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_logsumexp",
				Doc: "lse = log(sum exp(x)) for each row, its maximum subtracted first. A row of -inf gives -inf; one with +inf or NaN " +
					"gives NaN.",
				Operands: []Operand{
					x,
					{Name: "lse", Shape: PerRow, DType: Statistic, Output: true},
				},
				Torch: []Torch{
					{Name: "logsumexp", Results: []string{"lse"}, Saving: "logsumexp", Backward: []string{"logsumexp_bwd"}},
				},
			},
			{
				Name: "backward", Owned: "gander_logsumexp_grad",
				Doc: "dx = dlse * exp(x - lse) for each row.",
				Operands: []Operand{
					x,
					{Name: "dlse", Shape: Strided, DType: Statistic, Gradient: "lse"},
					{Name: "lse", Shape: PerRow, DType: Statistic},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}, Gradient: "x"},
				},
				Torch: []Torch{{Name: "logsumexp_bwd", Results: []string{"dx"}}},
			},
		},
	},
}
