package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/gander-go/gander/kernels"
)

// adaptation is a change to one kernel's PTX, which is tuned for sm_90, for another architecture.
type adaptation struct {
	Symbol   string
	Drop     bool // remove the kernel: the architecture does not use it
	Resident int  // if not dropped: minimum of resident CTAs per SM, which limits registers; 0 for no limit
}

// adaptations lists the changes to a unit's kernels for an architecture. The limits are edited in the PTX
// rather than compiled from the source, so that the compiler's front end runs only once for all architectures
// of a generation and for the embedded PTX.
func adaptations(unit, arch string) (all []adaptation) {
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		if v.Family.String() != unit {
			continue
		}
		if !v.In(arch) {
			all = append(all, adaptation{Symbol: v.Symbol, Drop: true})
		} else if resident := v.ResidentOn(arch); resident != v.Resident {
			all = append(all, adaptation{Symbol: v.Symbol, Resident: resident})
		}
	}
	return all
}

var (
	kernelStart   = regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`)
	residencyLine = regexp.MustCompile(`(?m)^\.minnctapersm \d+\n`)
)

// adapt applies the changes to a unit's PTX, which is some declarations followed by the kernels.
func adapt(ptx []byte, changes []adaptation) ([]byte, error) {
	wanted := map[string]adaptation{}
	for _, change := range changes {
		wanted[change.Symbol] = change
	}
	starts := kernelStart.FindAllSubmatchIndex(ptx, -1)
	if len(starts) == 0 {
		return nil, errors.New("the PTX has no kernels")
	}
	adapted := slices.Clone(ptx[:starts[0][0]])
	for i, start := range starts {
		kernel := ptx[start[0]:]
		if i+1 < len(starts) {
			kernel = ptx[start[0]:starts[i+1][0]]
		}
		symbol := string(ptx[start[2]:start[3]])
		change, ok := wanted[symbol]
		delete(wanted, symbol)
		switch {
		case !ok:
		case change.Drop:
			continue
		case !residencyLine.Match(kernel):
			return nil, fmt.Errorf("the PTX of %s has no directive .minnctapersm", symbol)
		case change.Resident == 0:
			kernel = residencyLine.ReplaceAll(kernel, nil)
		default:
			kernel = residencyLine.ReplaceAll(kernel, fmt.Appendf(nil, ".minnctapersm %d\n", change.Resident))
		}
		adapted = append(adapted, kernel...)
	}
	for symbol := range wanted {
		return nil, fmt.Errorf("the PTX has no kernel %s", symbol)
	}
	return adapted, nil
}
