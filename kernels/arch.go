package kernels

import (
	"strconv"
	"strings"
)

// capability is the number in an architecture's name: 86 for sm_86 and for compute_86, which is PTX.
func capability(arch string) (number int, ptx bool) {
	kind, digits, _ := strings.Cut(arch, "_")
	number, _ = strconv.Atoi(strings.TrimRight(digits, "af"))
	return number, kind == "compute"
}

// ResidentOn is how many CTAs per SM the compiler leaves registers for in the image of an architecture,
// such as "sm_86" or "compute_80". 0 leaves the number to the compiler, which then leaves registers for
// at least one.
func (v *Variant) ResidentOn(arch string) int {
	number, ptx := capability(arch)
	resident := v.Resident
	for _, r := range v.Elsewhere {
		if r.Major == number/10 || ptx && number >= 90 && r.Major > number/10 { // PTX runs on all later ones
			resident = min(resident, r.Resident)
		}
	}
	return resident
}

// In tells whether the image of an architecture holds the variant. It leaves out what no plan launches there.
func (v *Variant) In(arch string) bool {
	number, ptx := capability(arch)
	switch {
	case number < 90: // no clusters, no bulk copies; and what clears memory for those that use them
		return !v.Cluster && v.Shape != Ring && v.Shape != GridCooperative && v.Shape != GridSharedMemory &&
			v.Op != SoftmaxClear && v.Op != RMSNormClear
	case v.NoClusters:
		return false
	}
	return ptx || v.Without != number/10
}
