package policy

import "github.com/gander-go/gander/kernels"

var kernelOps = []kernels.Op{
	kernels.SoftmaxForward, kernels.SoftmaxBackward, kernels.RMSNormForward, kernels.RMSNormBackward,
	kernels.RMSNormBackward, kernels.CrossEntropyForward, kernels.CrossEntropyForwardDX,
	kernels.CrossEntropyBackward,
	kernels.NormForward, kernels.NormBackward, kernels.MaskedSoftmaxForward, kernels.MaskedSoftmaxBackward,
	kernels.GeneralCrossEntropyForward, kernels.GeneralCrossEntropyForwardDX,
	kernels.TokenStatisticsForward, kernels.AllTokenStatisticsForward, kernels.SoftCrossEntropyForward,
	kernels.LayerNormForward, kernels.LayerNormBackward, kernels.RMSNormResidualForward,
	kernels.RMSNormResidualBackward,
}

// Candidates lists what bench/tune.py times for a key: each compiled kernel with the clusters, CTAs per SM
// and stages that may pay, for the lengths of which it wastes less than three quarters of its threads.
func Candidates(op Operator, x kernels.DType, l Layout) (rows []Row) {
	const auto = 1
	if l == MixedTypes { // which only one regime takes
		return nil
	}
	seen := map[Row]bool{}
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		misplaced := v.Unaligned != (l != Aligned) || v.SameOffset && l != SameOffset
		if v.Op != kernelOps[op] || v.Family.DType() != x || misplaced {
			continue
		}
		add := func(regime Regime, edit func(*Row)) {
			r := Row{
				For: auto, Regime: regime, Threads: v.RowThreads, Vectors: v.Vectors, RowsPerStep: v.RowsPerStep,
			}
			edit(&r)
			if !seen[r] {
				seen[r] = true
				rows = append(rows, r)
			}
		}
		holds := func(r *Row, ctas int) {
			r.UpTo = v.Capacity() * int64(ctas)
			if r.UpTo > 8 {
				r.Over = r.UpTo / 4
			}
		}
		perSM := func(numbers ...int) func(Regime) {
			return func(regime Regime) {
				for _, n := range numbers {
					add(regime, func(r *Row) { r.Resident = n })
				}
			}
		}
		dw := op == RMSNormBackward || op == NormBackward || op == LayerNormBackward ||
			op == RMSNormResidualBackward
		switch shape := v.Shape; {
		case (shape == kernels.InRegisters || shape == kernels.Staged) && !dw:
			one, several := Registers, ClusterRegisters
			if shape == kernels.Staged {
				one, several = SharedMemory, ClusterSharedMemory
			}
			if !v.Cluster {
				add(one, func(r *Row) { holds(r, 1) })
				continue
			}
			for ctas := 2; ctas <= 16; ctas++ { // each length in the CTAs that hold it, and in twice as many
				add(several, func(r *Row) {
					r.MinCTAs, r.MaxCTAs = ctas, ctas
					r.Over, r.UpTo = v.Capacity()*int64((ctas-1)/2), v.Capacity()*int64(ctas)
				})
			}
		case shape == kernels.Loop:
			for _, n := range []int{2, 4, 6, 8, 10, 12, 16} {
				add(PersistentLoop, func(r *Row) { holds(r, 1); r.Resident = n })
			}
		case shape == kernels.Lanes && dw:
			for n := 1; n <= 4; n++ {
				add(PersistentLanes, func(r *Row) { holds(r, 1); r.Resident = n })
			}
		case shape == kernels.Ring && dw:
			ctas := []int{1}
			if v.Cluster {
				ctas = []int{2, 3, 4, 5, 6, 7, 8, 12, 16}
			}
			for _, c := range ctas {
				for n := 1; n <= v.Resident+1; n++ {
					for _, stages := range []int{2, 3, 4, 6, 8} {
						add(PersistentRing, func(r *Row) {
							holds(r, c)
							r.Resident, r.Stages = n, stages
							if c > 1 {
								r.MinCTAs, r.MaxCTAs = c, c
							}
						})
					}
				}
			}
		case shape == kernels.GridCooperative && op != RMSNormBackwardDX:
			for _, stages := range []int{0, 6, 13, 20, 27, 40} {
				add(GridCooperative, func(r *Row) { r.Stages = stages })
			}
		case shape == kernels.GridSharedMemory:
			add(GridSharedMemory, func(r *Row) { r.Over, r.Below, r.Resident = 16383, Count{N: 17}, 2 })
		case shape == kernels.Partial && (op == CrossEntropyForward || op == GeneralCrossEntropyForward ||
			op == TokenStatisticsForward || op == AllTokenStatisticsForward || op == SoftCrossEntropyForward):
			perSM(1, 2, 4, 8, 16)(Stream)
		case shape == kernels.Partial && !dw:
			for _, n := range []int{1, 2, 4, 8, 16, 64} {
				add(TwoPasses, func(r *Row) {
					*r = Row{For: auto, Regime: TwoPasses, Over: 511, Resident: n}
				})
			}
		case shape == kernels.Columns && dw:
			for _, n := range []int{2, 4, 8} {
				add(ByColumns, func(r *Row) { *r = Row{For: auto, Regime: ByColumns, Resident: n} })
			}
		case shape == kernels.Elementwise:
			add(Elementwise, func(r *Row) { *r = Row{For: auto, Regime: Elementwise} })
		}
	}
	return rows
}
