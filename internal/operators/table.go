package operators

import "slices"

// Options of several groups.
var (
	algorithm = Option{Name: "algorithm", Type: Algorithm,
		Doc: "how a GPU processes the rows"}
	batchInvariant = Option{Name: "batch_invariant", Type: Flag,
		Doc: "a row's bits do not depend on how many rows there are"}
	inplaceBackward = Option{Name: "inplace_backward", Type: Flag,
		Doc: "backward writes the gradients over the arguments that they are for"}
)

// Operands of several operators.
var (
	x           = Operand{Name: "x", Shape: Rows, DType: Float}
	classWeight = Operand{Name: "weight", Shape: Columns, DType: Companion, Optional: true}
	target      = Operand{Name: "target", Shape: Strided, DType: Index}
	mask        = Operand{Name: "mask", Shape: Broadcast, DType: Mask, Optional: true}
)

// Operands of cross-entropy.
var (
	divisor  = Operand{Name: "divisor", Shape: One, DType: Statistic, Optional: true}
	upstream = Operand{Name: "upstream", Shape: One, DType: Statistic, Optional: true}
	expected = Operand{Name: "upstream", Shape: One, DType: Statistic, Optional: true, Needs: "one_pass"}

	probabilities = Operand{Name: "target", Shape: Rows, DType: Companion} // of classes, in place of one class
)

// Operands of the norms.
var (
	weight   = Operand{Name: "weight", Shape: HeadColumns, DType: Companion, Optional: true}
	bias     = Operand{Name: "bias", Shape: HeadColumns, DType: Companion, Optional: true, Fits: "weight"}
	residual = Operand{Name: "residual", Shape: Rows, DType: Companion, Optional: true, Fits: "x"}
	normed   = Operand{Name: "y", Shape: Rows, DType: Companion, Output: true, Over: []string{"x"},
		Choice: "out_dtype"}
	sum = Operand{Name: "residual_out", Shape: Rows, DType: Companion, Like: "residual", Output: true,
		Optional: true, Over: []string{"residual", "x"}, Choice: "residual_dtype"}
	mean = Operand{Name: "mean", Shape: PerRow, DType: Statistic}
	rstd = Operand{Name: "rstd", Shape: PerRow, DType: Statistic}

	rnorm = Operand{Name: "rnorm", Shape: PerRow, DType: Statistic} // of l2norm

	stored = Operand{Name: "x", Shape: Rows, DType: Float, Stored: "residual_out"}
	dout   = Operand{Name: "dout", Shape: Rows, DType: Companion, Gradient: "y"}
	dsum   = Operand{Name: "dresidual_out", Shape: Rows, DType: Companion, Optional: true,
		Gradient: "residual_out"}
	dx = Operand{Name: "dx", Shape: Rows, DType: Companion, Output: true, Over: []string{"dout"},
		Choice: "x_dtype", Gradient: "x"}
	dresidual = Operand{Name: "dresidual", Shape: Rows, DType: Companion, Output: true, Optional: true,
		Choice: "residual_dtype", Gradient: "residual", Twin: "dx"}
	dw = Operand{Name: "dw", Shape: HeadColumns, DType: Same, Like: "weight", Output: true, Optional: true,
		Needs: "weight", Fits: "weight", Gradient: "weight"}
	db = Operand{Name: "db", Shape: HeadColumns, DType: Parameter, Like: "weight", Output: true, Optional: true,
		Fits: "weight", Choice: "bias_dtype", Gradient: "bias"}
)

// Operands of statistics of tokens' logits.
var (
	logits  = Operand{Name: "logits", Shape: Rows, DType: Float}
	index   = Operand{Name: "index", Shape: Strided, DType: Index}
	rowMask = Operand{Name: "row_mask", Shape: Strided, DType: RowMask, Optional: true}
)

// statistic returns an output with a number for each row.
func statistic(name string, of DType) Operand {
	return written(Operand{Name: name, Shape: PerRow, DType: of})
}

var ignoreIndex = Option{Name: "ignore_index", Type: Integer, Default: -100,
	Doc: "rows with this target are ignored"}

// mapping returns the options by which logits are mapped, which the operand x is.
func mapping(x string, since int) []Option {
	return []Option{
		{Name: "scale", Type: Real, Default: 1, Since: since,
			Doc: x + " is mapped to z = softcap * tanh(scale * " + x + " / softcap) / temperature, without a " +
				"softcap to scale * " + x + " / temperature, and all else is of z; more than 0"},
		{Name: "softcap", Type: Real, Since: since, Doc: "see scale; more than 0, or 0 for none"},
		{Name: "temperature", Type: Real, Default: 1, Since: since, Doc: "see scale; more than 0"},
	}
}

// Operands and options of gated linear units.
var (
	gate   = Operand{Name: "gate", Shape: Rows, DType: Float}
	up     = Operand{Name: "up", Shape: Rows, DType: Same, Like: "gate"}
	gating = []Option{
		{Name: "gelu", Type: Flag, Doc: "the activation is GELU, not SiLU"},
		{Name: "tanh", Type: Flag, Doc: "with gelu: by its approximation with a hyperbolic tangent"},
		{Name: "round_activation", Type: Flag, Doc: "act(gate) is rounded to gate's dtype before it is multiplied"},
	}
)

// Operands of rotary position embeddings.
var (
	cos       = Operand{Name: "cos", Shape: Positions, DType: Companion}
	sin       = Operand{Name: "sin", Shape: Positions, DType: Same, Like: "cos", Fits: "cos"}
	offsets   = Operand{Name: "offsets", Shape: Sequences, DType: Index, Optional: true}
	cuSeqlens = Operand{Name: "cu_seqlens", Shape: Boundaries, DType: Index, Optional: true}
)

// Operands and options of rotary position embeddings of normalized heads.
var (
	queries    = Operand{Name: "q", Shape: Heads, DType: Float}
	keys       = Operand{Name: "k", Shape: OtherHeads, DType: Same, Like: "q", Optional: true}
	ofQueries  = Operand{Name: "q_weight", Shape: Columns, DType: Companion, Optional: true}
	ofKeys     = Operand{Name: "k_weight", Shape: Columns, DType: Companion, Optional: true}
	queriesOut = Operand{Name: "q_out", Shape: Heads, DType: Same, Like: "q", Output: true, Over: []string{"q"}}
	keysOut    = Operand{Name: "k_out", Shape: OtherHeads, DType: Same, Like: "q", Output: true, Optional: true,
		Needs: "k", Fits: "k", Over: []string{"k"}}
	rotating = []Option{
		{Name: "offset", Type: Integer, Varies: true, Doc: "added to the positions of all tokens"},
		{Name: "interleaved", Type: Flag, Doc: "a pair is two adjacent elements, not one of each half"},
		{Name: "per_element", Type: Flag,
			Doc: "cos and sin have a number for each element of the part that is rotated, not for each pair"},
	}
)

// written returns an operand as an output that may be absent.
func written(p Operand) Operand {
	p.Output, p.Optional = true, true
	return p
}

// into lists the operands as arguments that an operator of PyTorch writes.
func into(names ...string) (list []Written) {
	for _, name := range names {
		list = append(list, Written{name, name})
	}
	return list
}

// Table defines all operators, in the order of gander.h.
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
					{Name: "softmax", Results: []string{"y"}, Backward: "softmax_bwd"},
				},
			},
			{
				Name: "backward", Owned: "gander_softmax_grad",
				Doc: "dx = (dy - sum(dy * y)) * y for each row.",
				Operands: []Operand{
					{Name: "dy", Shape: Rows, DType: Float, Gradient: "y"},
					{Name: "y", Shape: Rows, DType: Same, Like: "dy"},
					{Name: "dx", Shape: Rows, DType: Same, Like: "dy", Output: true, Over: []string{"dy", "y"},
						Gradient: "x"},
				},
				Torch: []Torch{{Name: "softmax_bwd", Results: []string{"dx"}}},
			},
		},
	},
	{
		Name: "masked_softmax", Type: "MaskedSoftmax",
		Options: []Option{
			{Name: "scale", Type: Real, Default: 1, Doc: "x is multiplied by it before the mask is applied"},
			{Name: "log", Type: Flag, Doc: "y is the logarithm of the softmax"},
			{Name: "causal", Type: Flag, Rank: 2,
				Doc: "also masks the columns after i in row i of each (Q, N), the last two dimensions"},
			{Name: "masked_zero", Type: Flag, Only: "forward",
				Doc: "a row that is masked whole becomes zeros (-inf with log), else NaN"},
			batchInvariant,
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_masked_softmax", Refuses: true,
				Doc: "y = exp(h - max h) / sum exp(h - max h) for each row, or with log h - max h - " +
					"log(sum exp(h - max h)), with h = x * scale, which is not rounded. A bool or uint8 mask lets the " +
					"elements take part where it is not 0. Any other is added to h, and -inf masks an element. Masked " +
					"elements count for nothing, whatever they are: their y is 0, or with log -inf. A row is NaN, its " +
					"masked elements too, if those that take part have a NaN or +inf, or are all -inf.",
				Operands: []Operand{
					x, mask,
					{Name: "y", Shape: Rows, DType: Companion, Output: true, Over: []string{"x"}, Choice: "out_dtype"},
				},
				Torch: []Torch{
					{Name: "masked_softmax", Results: []string{"y"}, Backward: "masked_softmax_bwd"},
				},
			},
			{
				Name: "backward", Owned: "gander_masked_softmax_grad", Refuses: true,
				Doc: "dx = scale * (dy - sum(dy * y)) * y for each row, or with log dx = scale * (dy - exp(y) * " +
					"sum(dy)). The sums are over the elements that take part. dx of a masked element is 0, whatever " +
					"dy and y are there.",
				Operands: []Operand{
					{Name: "dy", Shape: Rows, DType: Float, Gradient: "y"},
					{Name: "y", Shape: Rows, DType: Companion},
					mask,
					{Name: "dx", Shape: Rows, DType: Companion, Output: true, Over: []string{"dy", "y"},
						Choice: "x_dtype", Gradient: "x"},
				},
				Torch: []Torch{{Name: "masked_softmax_bwd", Results: []string{"dx"}}},
			},
		},
	},
	{
		Name: "rmsnorm", Type: "RMSNorm",
		Options: []Option{
			{Name: "eps", Type: Real, Default: 1e-6, Device: true, Only: "forward",
				Doc: "added to the mean of squares"},
			algorithm, batchInvariant,
			{Name: "weight_offset", Type: Real, Doc: "added to each weight; needs a weight"},
			{Name: "round_normalized", Type: Flag,
				Doc: "h * rstd is rounded to x's dtype before the weight is applied, and in backward to dx's"},
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_rmsnorm", Refuses: true,
				Doc: "y = h * rstd * (weight + weight_offset) + bias with h = x + residual, which is not rounded, " +
					"and rstd = 1 / sqrt(mean(h^2) + eps) for each row (Zhang and Sennrich, \"Root Mean Square " +
					"Layer Normalization\", 2019). residual_out receives h. A weight or bias of shape (H, N) " +
					"is that of each head, and both have it. With them, bias, residual, residual_out, weight_offset or " +
					"round_normalized the only algorithm is auto.",
				Operands: []Operand{x, weight, bias, residual, normed, sum, written(rstd)},
				Plain:    []string{"weight", "rstd", "eps"},
				Torch: []Torch{
					{Name: "rmsnorm", Results: []string{"y", "residual_out", "rstd"},
						OnDemand: []string{"residual_out", "rstd"}, Backward: "rmsnorm_bwd"},
					{Name: "rmsnorm_out", Writes: into("y", "residual_out", "rstd")},
					{Name: "fused_add_rmsnorm_", Writes: []Written{{"x", "y"}, {"residual", "residual_out"}},
						Without: []string{"bias", "algorithm"}, Must: []string{"residual"}},
				},
			},
			{
				Name: "backward", Owned: "gander_rmsnorm_grad", Refuses: true,
				Doc: "x is forward's residual_out if it wrote one, else its x. With h = x * rstd and g = dout * " +
					"(weight + weight_offset): dx = (g - h * mean(g * h)) * rstd + dresidual_out for each row. " +
					"dresidual receives the same numbers as dx. dw = the sum over rows of dout * h, and db = the sum " +
					"over rows of dout, accumulated in at least float32 in a fixed order. With a weight of shape (H, N) " +
					"the sums are over the rows of each head. With that, dresidual_out, dresidual, db, weight_offset, " +
					"round_normalized or a dx of another dtype than x the only algorithm is auto.",
				Operands: []Operand{stored, weight, dout, dsum, rstd, dx, dresidual, dw, db},
				Plain:    []string{"weight", "dw"},
				Torch: []Torch{
					{Name: "rmsnorm_bwd", Results: []string{"dx", "dresidual", "dw", "db"},
						OnDemand: []string{"dresidual", "dw", "db"}},
				},
			},
		},
	},
	{
		Name: "l2norm", Type: "L2Norm",
		Options: []Option{
			{Name: "eps", Type: Real, Default: 1e-6, Only: "forward", Doc: "added to the sum of squares"},
			batchInvariant,
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_l2norm", Refuses: true,
				Doc: "y = x * rnorm with rnorm = 1 / sqrt(sum(x^2) + eps) for each row.",
				Operands: []Operand{
					x,
					{Name: "y", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}},
					written(rnorm),
				},
				Torch: []Torch{
					{Name: "l2norm", Results: []string{"y", "rnorm"}, OnDemand: []string{"rnorm"},
						Backward: "l2norm_bwd"},
				},
			},
			{
				Name: "backward", Owned: "gander_l2norm_grad",
				Doc: "dx = (dy - h * sum(dy * h)) * rnorm with h = x * rnorm for each row.",
				Operands: []Operand{
					x,
					{Name: "dy", Shape: Rows, DType: Same, Like: "x", Gradient: "y"},
					rnorm,
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"dy"},
						Gradient: "x"},
				},
				Torch: []Torch{{Name: "l2norm_bwd", Results: []string{"dx"}}},
			},
		},
	},
	{
		Name: "glu", Type: "GLU", Options: gating,
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_glu", Refuses: true,
				Doc: "y = act(gate) * up for each element (Shazeer, \"GLU Variants Improve Transformer\", 2020), where " +
					"act(v) is v * sigmoid(v), or with gelu v times the normal distribution's share below v.",
				Operands: []Operand{gate, up,
					{Name: "y", Shape: Rows, DType: Same, Like: "gate", Output: true, Over: []string{"gate", "up"}}},
				Torch: []Torch{{Name: "glu", Results: []string{"y"}, Extra: []Option{inplaceBackward},
					Backward: "glu_bwd"}},
			},
			{
				Name: "backward", Owned: "gander_glu_grad", Refuses: true,
				Doc: "dgate = dy * up * act'(gate) and dup = dy * act(gate) for each element.",
				Operands: []Operand{gate, up,
					{Name: "dy", Shape: Rows, DType: Same, Like: "gate", Gradient: "y"},
					{Name: "dgate", Shape: Rows, DType: Same, Like: "gate", Output: true,
						Over: []string{"gate"}, Gradient: "gate"},
					{Name: "dup", Shape: Rows, DType: Same, Like: "gate", Output: true,
						Over: []string{"up"}, Gradient: "up"}},
				Torch: []Torch{
					{Name: "glu_bwd", Results: []string{"dgate", "dup"}},
					{Name: "glu_bwd_", Writes: []Written{{"gate", "dgate"}, {"up", "dup"}}},
				},
			},
		},
	},
	{
		Name: "packed_glu", Type: "PackedGLU", Options: gating,
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_packed_glu", Refuses: true,
				Doc: "glu_forward of the two halves of each row: y = act(x[:N / 2]) * x[N / 2:].",
				Operands: []Operand{x,
					{Name: "y", Shape: HalfRows, DType: Same, Like: "x", Output: true}},
				Torch: []Torch{{Name: "packed_glu", Results: []string{"y"}, Extra: []Option{inplaceBackward},
					Backward: "packed_glu_bwd"}},
			},
			{
				Name: "backward", Owned: "gander_packed_glu_grad", Refuses: true,
				Doc: "dx is dgate and dup of glu_backward, in the two halves of each row.",
				Operands: []Operand{x,
					{Name: "dy", Shape: HalfRows, DType: Same, Like: "x", Gradient: "y"},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}, Gradient: "x"}},
				Torch: []Torch{
					{Name: "packed_glu_bwd", Results: []string{"dx"}},
					{Name: "packed_glu_bwd_", Writes: []Written{{"x", "dx"}}},
				},
			},
		},
	},
	{
		Name: "rotary", Type: "Rotary",
		Options: append(slices.Clone(rotating),
			Option{Name: "round_products", Type: Flag,
				Doc: "products are rounded to the rows' dtype before they are added"}),
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_rotary", Refuses: true,
				Doc: "Each pair of elements (a, b) of a head becomes (a cos - b sin, b cos + a sin), with the numbers " +
					"of the token's position and of the pair (Su et al., \"RoFormer: Enhanced Transformer with Rotary " +
					"Position Embedding\", 2021). The pairs are those of the first R columns, R = 2 W, or with " +
					"per_element W: elements i and i + R / 2, or with interleaved 2 i and 2 i + 1. With per_element each " +
					"element has the cos and sin of its column. The other columns are copied. A token's position is its " +
					"place in its sequence plus offset, and plus its sequence's number of offsets. cu_seqlens has the " +
					"first token of each of the sequences that lie one after the other, and the end of the last. Tokens " +
					"of none are copied. A token whose position is not in the table becomes NaN.",
				Operands: []Operand{queries, keys, cos, sin, offsets, cuSeqlens, queriesOut, keysOut},
				Torch: []Torch{
					{Name: "rotary", Results: []string{"q_out", "k_out"}, OnDemand: []string{"k_out"},
						Backward: "rotary_bwd"},
					{Name: "rotary_", Writes: []Written{{"q", "q_out"}, {"k", "k_out"}}},
				},
			},
			{
				Name: "backward", Owned: "gander_rotary_grad", Refuses: true,
				Doc: "The gradients of q and k: each pair (a, b) of the gradients of q_out and k_out becomes (a cos + " +
					"b sin, b cos - a sin). All else is as in rotary_forward.",
				Operands: []Operand{
					{Name: "dq_out", Shape: Heads, DType: Float, Gradient: "q_out"},
					{Name: "dk_out", Shape: OtherHeads, DType: Same, Like: "dq_out", Optional: true, Gradient: "k_out"},
					cos, sin, offsets, cuSeqlens,
					{Name: "dq", Shape: Heads, DType: Same, Like: "dq_out", Output: true, Over: []string{"dq_out"},
						Gradient: "q"},
					{Name: "dk", Shape: OtherHeads, DType: Same, Like: "dq_out", Output: true, Optional: true,
						Needs: "dk_out", Fits: "dk_out", Over: []string{"dk_out"}, Gradient: "k"},
				},
				Torch: []Torch{{Name: "rotary_bwd", Results: []string{"dq", "dk"}, OnDemand: []string{"dk"}}},
			},
		},
	},
	{
		Name: "qk_norm_rotary", Type: "QKNormRotary",
		Options: append(slices.Clone(rotating),
			Option{Name: "eps", Type: Real, Default: 1e-6, Doc: "added to the mean of squares"},
			Option{Name: "weight_offset", Type: Real, Doc: "added to each weight; needs a weight"},
			Option{Name: "round_normalized", Type: Flag,
				Doc: "x * rstd is rounded to q's dtype before the weight is applied, and in the weights' gradients"},
			Option{Name: "round_products", Type: Flag,
				Doc: "the normalized head is rounded to q's dtype, and so are products before they are added"},
		),
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_qk_norm_rotary", Refuses: true,
				Doc: "rotary_forward of n = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) " +
					"for each head x of q and k, of at most 512 columns. Without weights they are 1.",
				Operands: []Operand{queries, keys, ofQueries, ofKeys, cos, sin, offsets, cuSeqlens, queriesOut, keysOut},
				Torch: []Torch{
					{Name: "qk_norm_rotary", Results: []string{"q_out", "k_out"}, OnDemand: []string{"k_out"},
						Backward: "qk_norm_rotary_bwd"},
					{Name: "qk_norm_rotary_", Writes: []Written{{"q", "q_out"}, {"k", "k_out"}}},
				},
			},
			{
				Name: "backward", Owned: "gander_qk_norm_rotary_grad", Refuses: true,
				Doc: "With h = x * rstd, dn that of rotary_backward and g = dn * (weight + weight_offset): dx = (g - " +
					"h * mean(g * h)) * rstd for each head, and a weight's gradient is the sum over heads and tokens " +
					"of dn * h, accumulated in at least float32 in a fixed order. Without dk_out, k is left alone.",
				Operands: []Operand{queries, keys, ofQueries, ofKeys, cos, sin, offsets, cuSeqlens,
					{Name: "dq_out", Shape: Heads, DType: Same, Like: "q", Gradient: "q_out"},
					{Name: "dk_out", Shape: OtherHeads, DType: Same, Like: "q", Optional: true, Needs: "k", Fits: "k",
						Gradient: "k_out"},
					{Name: "dq", Shape: Heads, DType: Same, Like: "q", Output: true, Over: []string{"dq_out"},
						Gradient: "q"},
					{Name: "dk", Shape: OtherHeads, DType: Same, Like: "q", Output: true, Optional: true,
						Needs: "dk_out", Fits: "dk_out", Over: []string{"dk_out"}, Gradient: "k"},
					{Name: "dq_weight", Shape: Columns, DType: Same, Like: "q_weight", Output: true, Optional: true,
						Needs: "q_weight", Gradient: "q_weight"},
					{Name: "dk_weight", Shape: Columns, DType: Same, Like: "k_weight", Output: true, Optional: true,
						Needs: "dk_out", Gradient: "k_weight"},
				},
				Torch: []Torch{
					{Name: "qk_norm_rotary_bwd", Results: []string{"dq", "dk", "dq_weight", "dk_weight"},
						OnDemand: []string{"dk", "dq_weight", "dk_weight"}},
				},
			},
		},
	},
	{
		Name: "layernorm", Type: "LayerNorm",
		Options: []Option{
			{Name: "eps", Type: Real, Default: 1e-6, Only: "forward", Doc: "added to the variance"},
			batchInvariant,
		},
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_layernorm", Refuses: true,
				Doc: "y = (h - mean) * rstd * weight + bias with h = x + residual and rstd = 1 / sqrt(mean((h - " +
					"mean)^2) + eps) for each row (Ba, Kiros and Hinton, \"Layer Normalization\", 2016). h is " +
					"rounded to the dtype of residual_out, which receives it. If residual_out is absent, that is the " +
					"dtype which x + residual has in torch: x's, or if residual has another one, float32 (float64 for " +
					"float64). So y is the same with such a residual_out and without. A weight or bias of shape (H, N) " +
					"is that of each head, and both have it.",
				Operands: []Operand{x, weight, bias, residual, normed, sum, written(mean), written(rstd)},
				Torch: []Torch{
					{Name: "layernorm", Results: []string{"y", "residual_out", "mean", "rstd"},
						OnDemand: []string{"residual_out", "mean", "rstd"}, Backward: "layernorm_bwd"},
					{Name: "layernorm_out", Writes: into("y", "residual_out", "mean", "rstd")},
				},
			},
			{
				Name: "backward", Owned: "gander_layernorm_grad",
				Doc: "x is forward's residual_out if it wrote one, else its x. With h = (x - mean) * rstd and g = " +
					"dout * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd + dresidual_out for each row, where " +
					"mean(g) and mean(g * h) are of the row. If x is float32, and on the host if it has 16 bits, h also " +
					"has the digits of x's mean that mean lost when it was rounded to float32. dresidual receives the " +
					"same numbers as dx. dw = the sum over rows of dout * h, and db = the sum over rows of dout, " +
					"accumulated in at least float32 in a fixed order. With a weight of shape (H, N) the sums are over " +
					"the rows of each head.",
				Operands: []Operand{stored, weight, dout, dsum, mean, rstd, dx, dresidual, dw, db},
				Torch: []Torch{
					{Name: "layernorm_bwd", Results: []string{"dx", "dresidual", "dw", "db"},
						OnDemand: []string{"dresidual", "dw", "db"}},
				},
			},
		},
	},
	{
		Name: "cross_entropy", Type: "CrossEntropy",
		Options: slices.Concat([]Option{
			ignoreIndex,
			{Name: "reduction", Type: Reduction, Torch: 1, Doc: "how the rows' losses are reduced"},
			{Name: "label_smoothing", Type: Real, Since: 1,
				Doc: "the share of a row's loss that all classes have alike, 0 to 1; not with slice"},
			{Name: "z_loss", Type: Real, Since: 1,
				Doc: "the factor of lse^2 in a row's loss, at least 0; not with weight in a mean"},
		}, mapping("x", 1), []Option{
			{Name: "one_pass", Type: Flag,
				Doc: "forward also computes the gradient, in the same pass over x: dx is the gradient of the " +
					"reduced loss. backward takes that dx, which must not overlap x, and computes it again only " +
					"if dloss, a single element, has other bits than upstream, or 1 without one. It compares them on " +
					"the device, without synchronization. If upstream is NaN, forward may leave dx as it is, and " +
					"backward computes it. In two parts, the second part of lse is then not the logarithm of a sum " +
					"but a sum, from which both compute the gradient, on a GPU with the same bits. Not with reduction none"},
			batchInvariant,
			{Name: "slice", Type: Flag, Only: "backward",
				Doc: "x is a slice of each row's classes, and a target counts from the slice's first class; " +
					"not with one_pass. lse is that of whole rows. In a row whose target is not in the slice " +
					"nothing is subtracted, and its weight is 1"},
		}),
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_cross_entropy", Refuses: true,
				Doc: "loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the row's log-sum-exp. " +
					"loss is the loss of each row, their sum, or their mean: the sum divided by the denominator, " +
					"which is the sum of the weights of the rows that are not ignored (NaN if all are). A row is " +
					"ignored if its target is ignore_index or a class of weight 0; its loss and gradient are 0. " +
					"The loss and gradient of a row whose target is outside of [0, N) are NaN, as is a mean that it " +
					"takes part in, with all gradients of the mean. dx = weight[t] * (softmax(x) - onehot(t)), the " +
					"gradient of the sum of the losses, is computed in the same " +
					"pass over x. With e = label_smoothing and C classes a row's loss is (1 - e) * weight[t] * " +
					"(lse - x[t]) + e / C * sum(weight[c] * (lse - x[c])) (Szegedy et al., \"Rethinking the " +
					"Inception Architecture for Computer Vision\", 2016), also if the target has weight 0; a class " +
					"of weight 0 counts for nothing, even if its logit is -inf. z_loss adds z_loss * lse^2 " +
					"(Chowdhery et al., \"PaLM: Scaling Language Modeling with Pathways\", 2022), also if the target has " +
					"weight 0. With scale, softcap and temperature dx is still the gradient of x. denominator is " +
					"written with any reduction. Loss and dx are divided by divisor, which must be NULL with reduction " +
					"mean. dx is the gradient for an upstream gradient of upstream, which is 1 if absent.",
				Operands: []Operand{
					x, target, classWeight, divisor, upstream,
					{Name: "loss", Shape: Reduced, DType: Statistic, Output: true},
					{Name: "lse", Shape: Statistics, DType: Statistic, Output: true, Optional: true},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Optional: true, Over: []string{"x"}},
					{Name: "denominator", Shape: One, DType: Statistic, Output: true, Optional: true},
				},
				Torch: []Torch{
					{Name: "cross_entropy", Results: []string{"loss", "lse"}, OnDemand: []string{"lse"}, Packed: true,
						Without: []string{"one_pass"},
						Extra: []Option{
							inplaceBackward,
							{Name: "one_pass", Type: Flag, Torch: -1,
								Doc: "whether forward also computes the gradient; None decides by x's size"},
						},
						Backward: "cross_entropy_bwd"},
					{Name: "cross_entropy_fwd", Results: []string{"loss", "lse", "dx"},
						OnDemand: []string{"lse", "dx"}, Without: []string{"one_pass", "reduction"}},
					{Name: "cross_entropy_fwd_dx_", Results: []string{"loss", "lse"}, Writes: []Written{{"x", "dx"}},
						Without: []string{"one_pass", "reduction"}},
					{Name: "cross_entropy_fwd_out", Writes: into("loss", "lse", "dx"),
						Without: []string{"divisor", "upstream", "one_pass", "reduction"}},
					{Name: "cross_entropy_fwd_one_pass", Results: []string{"loss", "lse", "dx"}, Packed: true,
						Fixed: map[string]float64{"one_pass": 1}},
				},
			},
			{
				Name: "backward", Owned: "gander_cross_entropy_grad", Refuses: true,
				Doc: "dx = dloss * weight[t] * (softmax(x) - onehot(t)), or with e = label_smoothing dloss * " +
					"((1 - e) * weight[t] * (softmax(x) - onehot(t)) + e / C * (sum(weight) * softmax(x) - weight)), " +
					"with z_loss, scale, softcap and temperature the gradient of forward's loss, " +
					"divided by the denominator with reduction mean. That requires denominator, or an lse that " +
					"contains it; otherwise denominator must be NULL. With the other reductions it is divided by " +
					"divisor. upstream is forward's, with one_pass. lse is what forward wrote. Its two parts are more " +
					"accurate than their sum, which loses digits if logits are large.",
				Operands: []Operand{
					x, target, classWeight,
					{Name: "dloss", Shape: Upstream, DType: Statistic, Gradient: "loss"},
					{Name: "lse", Shape: Statistics, DType: Statistic},
					divisor, expected,
					{Name: Denominator, Shape: One, DType: Statistic, Optional: true},
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}, Read: "one_pass",
						Gradient: "x"},
				},
				Torch: []Torch{
					{Name: "cross_entropy_bwd", Results: []string{"dx"}, Without: []string{"one_pass"}},
					{Name: "cross_entropy_bwd_", Writes: []Written{{"x", "dx"}}, Without: []string{"one_pass"}},
					{Name: "cross_entropy_bwd_out", Writes: into("dx"),
						Without: []string{"divisor", "one_pass", "slice", "reduction"}},
					{Name: "cross_entropy_bwd_one_pass", Writes: into("dx"), Without: []string{"slice"},
						Fixed: map[string]float64{"one_pass": 1}},
				},
			},
		},
	},
	{
		Name: "soft_cross_entropy", Type: "SoftCrossEntropy",
		Options: slices.Concat([]Option{
			{Name: "reduction", Type: Reduction, Torch: 1, Doc: "how the rows' losses are reduced"},
			{Name: "label_smoothing", Type: Real,
				Doc: "the share of a row's target that is divided among all classes, 0 to 1"},
			{Name: "z_loss", Type: Real, Doc: "the factor of lse^2 in a row's loss, at least 0"},
		}, mapping("x", 0), []Option{batchInvariant}),
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_soft_cross_entropy", Refuses: true,
				Doc: "Cross-entropy of logits and class probabilities: loss[m] = sum(weight[c] * q[c] * (lse[m] - " +
					"x[m, c])) with q = target[m] and lse the row's log-sum-exp. A class of weight or q 0 counts for " +
					"nothing, even if its logit is -inf. q may be any numbers: neither their sign nor their sum is " +
					"checked. With e = label_smoothing and C classes q is (1 - e) * target[m] + e / C. z_loss adds " +
					"z_loss * lse^2. With scale, softcap and temperature all is of z. loss is the loss of each row, their " +
					"sum, or their mean over the M rows, whatever their weights (NaN without rows). It is divided by " +
					"divisor, which must be NULL with reduction mean. state receives what backward reads of each row: its " +
					"maximum m, log(sum exp(x - m)), and sum(weight[c] * q[c]).",
				Operands: []Operand{
					x,
					probabilities,
					classWeight, divisor,
					{Name: "loss", Shape: Reduced, DType: Statistic, Output: true},
					written(Operand{Name: "state", Shape: RowStates, DType: Statistic}),
				},
				Torch: []Torch{
					{Name: "soft_cross_entropy", Results: []string{"loss", "state"}, OnDemand: []string{"state"},
						Extra: []Option{inplaceBackward}, Backward: "soft_cross_entropy_bwd"},
				},
			},
			{
				Name: "backward", Owned: "gander_soft_cross_entropy_grad", Refuses: true,
				Doc: "dx[c] = dloss * (sum(weight * q) * softmax(x)[c] - weight[c] * q[c]) for each row, with " +
					"z_loss, scale, softcap and temperature the gradient of forward's loss. It is divided by M with " +
					"reduction mean, with the others by divisor. state is forward's. target gets no gradient.",
				Operands: []Operand{
					x,
					probabilities,
					classWeight,
					{Name: "dloss", Shape: Upstream, DType: Statistic, Gradient: "loss"},
					{Name: "state", Shape: RowStates, DType: Statistic},
					divisor,
					{Name: "dx", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}, Gradient: "x"},
				},
				Torch: []Torch{
					{Name: "soft_cross_entropy_bwd", Results: []string{"dx"}},
					{Name: "soft_cross_entropy_bwd_", Writes: []Written{{"x", "dx"}}},
				},
			},
		},
	},
	{
		Name: "token_statistics", Type: "TokenStatistics",
		Options: slices.Concat(
			[]Option{{Name: "ignore_index", Type: Integer, Default: -100, Doc: "rows with this index are left out"}},
			mapping("logits", 0), []Option{
				batchInvariant,
				{Name: "first", Type: Integer, Only: "forward",
					Doc: "logits is a slice of each row's tokens that begins with this one: index and predicted count " +
						"from the row's first token"},
				{Name: "classes", Type: Integer, Default: -1, Only: "forward",
					Doc: "how many tokens there are in all slices, by which mean_logit is divided; the state of a row " +
						"that is left out is then NaN; -1: logits has whole rows"},
				{Name: "slice", Type: Flag, Only: "backward",
					Doc: "logits is a slice of each row's tokens, and an index counts from the slice's first token. state " +
						"is that of whole rows. Pass -1 for a token before the slice, whose index adds nothing there, as one " +
						"behind the slice does not: -2 is an index that no slice has, which makes dlog_prob's part of the " +
						"row's gradient NaN, and a row whose index is ignore_index is left out, so let that be -3. local of " +
						"gander_sharded_token_statistics_combine is such an index"},
			}),
		Operators: []Operator{
			{
				Name: "forward", Owned: "gander_token_statistics", Refuses: true,
				Doc: "Statistics of each row z of logits with p = softmax(z), in one pass: log_prob = log p[index], " +
					"entropy = -sum p log p, log_sum_sq_probs = log sum p^2, mean_logit = the mean of z, predicted = the " +
					"first of the largest elements' columns, and is_top1 = whether that is index. Outputs that are NULL " +
					"are not computed. A row is left out where row_mask is 0, and where index " +
					"is ignore_index: its results are 0, and predicted is -1. log_prob is NaN where index is outside of " +
					"[0, N). The results of a row with a NaN or +inf, or of -inf alone, are NaN; with a NaN or +inf " +
					"predicted is -1. state receives what backward reads of each row: its maximum m, log(sum exp(z - " +
					"m)), which is -inf for a row of -inf alone, and sum p (m - z).",
				Operands: []Operand{
					logits, index, rowMask,
					statistic("log_prob", Statistic),
					statistic("entropy", Statistic),
					statistic("log_sum_sq_probs", Statistic),
					statistic("mean_logit", Statistic),
					statistic("is_top1", Truth),
					statistic("predicted", Class),
					written(Operand{Name: "state", Shape: RowStates, DType: Statistic}),
				},
				Torch: []Torch{
					{Name: "token_statistics",
						Results: []string{"log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted",
							"state"},
						OnDemand: []string{"log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted",
							"state"},
						Without: []string{"first", "classes"},
						Extra:   []Option{inplaceBackward}, Backward: "token_statistics_bwd"},
					{Name: "token_statistics_out",
						Writes: into("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted", "state")},
				},
			},
			{
				Name: "backward", Owned: "gander_token_statistics_grad", Refuses: true,
				Doc: "The gradient of z is dz[j] = dlog_prob * ([j = index] - p[j]) - dentropy * p[j] * (log p[j] + " +
					"entropy) for each row, and dlogits is that of logits. One of dlog_prob and dentropy, or both, is " +
					"given. state is forward's. dlogits of a row that is left out is 0, whatever logits are. It is NaN " +
					"where index is outside of [0, N) and dlog_prob is given, except with slice.",
				Operands: []Operand{
					logits, index, rowMask,
					{Name: "state", Shape: RowStates, DType: Statistic},
					{Name: "dlog_prob", Shape: Strided, DType: Statistic, Optional: true, Gradient: "log_prob"},
					{Name: "dentropy", Shape: Strided, DType: Statistic, Optional: true, Gradient: "entropy"},
					{Name: "dlogits", Shape: Rows, DType: Same, Like: "logits", Output: true, Over: []string{"logits"},
						Gradient: "logits"},
				},
				Torch: []Torch{
					{Name: "token_statistics_bwd", Results: []string{"dlogits"}},
					{Name: "token_statistics_bwd_", Writes: []Written{{"logits", "dlogits"}}},
				},
			},
		},
	},
	{
		Name: "sharded_cross_entropy", Type: "ShardedCrossEntropy",
		Options: []Option{
			{Name: "classes", Type: Integer, Default: -1,
				Doc: "how many there are in all slices; -1: unknown, so that the loss of a target behind them is " +
					"inf, not NaN"},
			ignoreIndex,
			{Name: "mean", Type: Flag, Doc: "loss is the sum of losses divided by the denominator"},
			{Name: "weighted", Type: Flag, Doc: "parts has the weights of the targets' classes"},
			batchInvariant,
		},
		Operators: []Operator{
			{
				Name: "combine", Owned: "gander_sharded_cross_entropy", Refuses: true,
				Doc: "The cross-entropy of N rows whose classes are divided into R slices, from what " +
					"cross_entropy_forward computes of each slice. parts is contiguous. For each slice it has the " +
					"rows' maxima and the logarithms of their sums of exp(x - max), the two parts of lse; then the " +
					"loss of each row, NaN if the target is not in the slice (a slice without classes has -inf, " +
					"-inf, NaN); and with weighted the weight of the target's class in the slice that has it, " +
					"elsewhere 0. target counts the classes of all slices. losses, loss, weights and denominator are " +
					"as cross_entropy_forward's of whole rows: each row's loss, their sum or mean, each row's " +
					"weight, and the sum of the weights. max and log_sum are the two parts of the lse of whole rows, " +
					"except that log_sum is NaN if the target is outside of [0, classes) and the row is not ignored: " +
					"so is then its gradient in every slice.",
				Operands: []Operand{
					{Name: "parts", Shape: Slices, DType: Wide},
					{Name: "target", Shape: Columns, DType: Index},
					{Name: "max", Shape: Columns, DType: Statistic, Output: true},
					{Name: "log_sum", Shape: Columns, DType: Statistic, Output: true},
					{Name: "losses", Shape: Columns, DType: Statistic, Output: true, Optional: true},
					{Name: "loss", Shape: One, DType: Statistic, Output: true, Optional: true},
					{Name: "weights", Shape: Columns, DType: Statistic, Output: true, Optional: true},
					{Name: "denominator", Shape: One, DType: Statistic, Output: true, Optional: true},
				},
				Torch: []Torch{
					{Name: "sharded_cross_entropy_combine", Without: []string{"batch_invariant"},
						Writes: into("max", "log_sum", "losses", "loss", "weights", "denominator")},
				},
			},
		},
	},
	{
		Name: "sharded_token_statistics", Type: "ShardedTokenStatistics",
		Options: []Option{
			{Name: "ignore_index", Type: Integer, Default: -100, Doc: "rows with this index are left out"},
			{Name: "first", Type: Integer, Doc: "the token with which this rank's slice begins"},
			{Name: "classes", Type: Integer, Default: -1,
				Doc: "how many tokens there are in all slices; -1: unknown, so that log_prob of an index behind them " +
					"is -inf, not NaN"},
			{Name: "narrow", Type: Flag,
				Doc: "parts has four numbers of each row, and of the results log_sum_sq_probs, mean_logit, is_top1 and " +
					"predicted must be absent"},
		},
		Operators: []Operator{
			{
				Name: "combine", Owned: "gander_sharded_token_statistics", Refuses: true,
				Doc: "The statistics of N rows whose tokens are divided into R slices, from what " +
					"token_statistics_forward computes of each slice with first and classes. parts is contiguous. For " +
					"each slice it has the rows' state, (N, 3), and log_prob; then without narrow log_sum_sq_probs, " +
					"mean_logit, and predicted, whose int64 take the place of two numbers of each row (if they are of " +
					"float64, the second half of it is not read). A slice without tokens is as one with a token of " +
					"-inf, whose first is behind all slices, except that mean_logit is 0. index counts the tokens of " +
					"all slices. The results are token_statistics_forward's of whole rows, and so is state. Those of a " +
					"row whose state is NaN in a slice are NaN, and predicted is -1. local receives the index that " +
					"token_statistics_backward takes with slice: it counts from first, with -1 for any before; it is " +
					"-2 if no slice has the index, and -3, to pass as backward's ignore_index, in a row that is left " +
					"out.",
				Operands: []Operand{
					{Name: "parts", Shape: SliceStatistics, DType: Wide},
					{Name: "index", Shape: Columns, DType: Index},
					{Name: "row_mask", Shape: Columns, DType: RowMask, Optional: true},
					written(Operand{Name: "log_prob", Shape: Columns, DType: Statistic}),
					written(Operand{Name: "entropy", Shape: Columns, DType: Statistic}),
					written(Operand{Name: "log_sum_sq_probs", Shape: Columns, DType: Statistic}),
					written(Operand{Name: "mean_logit", Shape: Columns, DType: Statistic}),
					written(Operand{Name: "is_top1", Shape: Columns, DType: Truth}),
					written(Operand{Name: "predicted", Shape: Columns, DType: Class}),
					written(Operand{Name: "state", Shape: ColumnStates, DType: Statistic}),
					written(Operand{Name: "local", Shape: Columns, DType: Class}),
				},
				Torch: []Torch{
					{Name: "sharded_token_statistics_combine",
						Writes: into("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted",
							"state", "local")},
				},
			},
		},
	},
	{
		Name: "rescale", Type: "Rescale",
		Options: []Option{batchInvariant},
		Operators: []Operator{
			{
				Name: "gradient", Owned: "gander_rescale",
				Doc: "y = x * (dloss / upstream): corrects a gradient that was made for another upstream gradient " +
					"than came. If y is x and dloss has the bits of upstream, which is 1 if absent, x is neither read " +
					"nor written. Both are compared on the device, without synchronization.",
				Operands: []Operand{
					x,
					{Name: "dloss", Shape: One, DType: Statistic},
					upstream,
					{Name: "y", Shape: Rows, DType: Same, Like: "x", Output: true, Over: []string{"x"}},
				},
				Torch: []Torch{
					{Name: "rescale_", Writes: []Written{{"x", "y"}}, Without: []string{"batch_invariant"}},
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
				Doc: "lse = log(sum exp(x)) for each row, computed with the maximum subtracted. A row of -inf " +
					"gives -inf, a row with +inf gives +inf, and a row with a NaN gives NaN.",
				Operands: []Operand{
					x,
					{Name: "lse", Shape: PerRow, DType: Statistic, Output: true},
				},
				Torch: []Torch{
					{Name: "logsumexp", Results: []string{"lse"}, Backward: "logsumexp_bwd"},
				},
			},
			{
				Name: "backward", Owned: "gander_logsumexp_grad",
				Doc: "dx = dlse * exp(x - lse) for each row. If lse is +inf, that is NaN where x is +inf, and 0 " +
					"elsewhere.",
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
