// Macros for the assembly: a fence, and for AVX-512 sums in 16 lanes of float64, masks for the last elements
// of a row, and the rounding to bfloat16.

// K5 = a mask that selects the first min(CX, 16) elements.
#define TAIL_MASK \
	MOVL  $-1, AX    ; \
	BZHIL CX, AX, AX ; \
	KMOVW AX, K5

// Orders what was written past the cache before all that follows. stream tells whether anything was. SFENCE
// waits until the store buffer is empty, which the next row need not do without streaming stores.
#define FENCE(stream) \
	TESTQ stream, stream ; \
	JEQ   2(PC)          ; \
	SFENCE

// Adds the float32 lanes of z to the sums in Z12 and Z13. y is the low half of z.
#define ACCUMULATE(z, y) \
	VEXTRACTF64X4 $1, z, Y15    ; \
	VCVTPS2PD     y, Z14        ; \
	VCVTPS2PD     Y15, Z15      ; \
	VADDPD        Z14, Z12, Z12 ; \
	VADDPD        Z15, Z13, Z13

// X12 = the sum of the lanes of Z12 and Z13.
#define HORIZONTAL_SUM \
	VADDPD        Z12, Z13, Z12 ; \
	VEXTRACTF64X4 $1, Z12, Y13  ; \
	VADDPD        Y12, Y13, Y12 ; \
	VEXTRACTF128  $1, Y12, X13  ; \
	VADDPD        X12, X13, X12 ; \
	VHADDPD       X12, X12, X12

// Constants of ROUND_BFLOAT16. r is a general register.
#define BFLOAT16_CONSTANTS(r) \
	MOVQ    ·simdConstants(SB), r          ; \
	VMOVUPS constants_bit0(r), Z27         ; \
	VMOVUPS constants_bfloat16Half(r), Z28 ; \
	VMOVUPS constants_bfloat16NaN(r), Z29

// Rounds the lanes of z to bfloat16. The result is in the high half of each lane. t and k are overwritten.
#define ROUND_BFLOAT16(z, t, k) \
	VPSRLD    $16, z, t    ; \
	VPANDD    Z27, t, t    ; \
	VPADDD    Z28, t, t    ; \
	VCMPPS    $3, z, z, k  ; \
	VPADDD    t, z, z      ; \
	VMOVDQA32 Z29, k, z
