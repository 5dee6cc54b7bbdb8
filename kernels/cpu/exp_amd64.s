//go:build goexperiment.simd

#include "go_asm.h"
#include "row_amd64.h"
#include "textflag.h"

// The exponential function for 16 lanes; row.go has the formula. It is in assembly because the Go compiler
// uses only 15 of the 32 vector registers and spills the rest to the stack, which took more than twice as
// long.

#define LOAD_CONSTANTS \
	MOVQ    ·simdConstants(SB), DX                ; \
	VMOVUPS constants_log2E(DX), Z17      ; \
	VMOVUPS constants_minusLn2High(DX), Z18 ; \
	VMOVUPS constants_minusLn2Low(DX), Z19 ; \
	VMOVUPS constants_expLow(DX), Z20     ; \
	VMOVUPS constants_exp6(DX), Z21       ; \
	VMOVUPS constants_exp5(DX), Z22       ; \
	VMOVUPS constants_exp4(DX), Z23       ; \
	VMOVUPS constants_exp3(DX), Z24       ; \
	VMOVUPS constants_exp2(DX), Z25       ; \
	VMOVUPS constants_one(DX), Z26

// p = exp(x), or 0 where x is below expLow. x, n and k are overwritten. Comparison 21 is "not less than",
// which also holds for a NaN, so exp(NaN) is NaN.
#define EXP(x, n, p, k) \
	VMULPS      Z17, x, n      ; \
	VRNDSCALEPS $8, n, n       ; \
	VCMPPS      $21, Z20, x, k ; \
	VFMADD231PS Z18, n, x      ; \
	VFMADD231PS Z19, n, x      ; \
	VMOVAPS     Z21, p         ; \
	VFMADD213PS Z22, x, p      ; \
	VFMADD213PS Z23, x, p      ; \
	VFMADD213PS Z24, x, p      ; \
	VFMADD213PS Z25, x, p      ; \
	VFMADD213PS Z26, x, p      ; \
	VFMADD213PS Z26, x, p      ; \
	VSCALEFPS.Z n, p, k, p

// Z8 to Z11 = exp(src - m) of 64 elements, for m in Z16.
#define EXP64 \
	VMOVUPS (SI), Z0       ; \
	VMOVUPS 64(SI), Z1     ; \
	VMOVUPS 128(SI), Z2    ; \
	VMOVUPS 192(SI), Z3    ; \
	VSUBPS  Z16, Z0, Z0    ; \
	VSUBPS  Z16, Z1, Z1    ; \
	VSUBPS  Z16, Z2, Z2    ; \
	VSUBPS  Z16, Z3, Z3    ; \
	EXP(Z0, Z4, Z8, K1)    ; \
	EXP(Z1, Z5, Z9, K2)    ; \
	EXP(Z2, Z6, Z10, K3)   ; \
	EXP(Z3, Z7, Z11, K4)

// Z8 = exp(src - m) of the first min(CX, 16) elements, and 0 in the other lanes. K5 = the mask of these
// elements.
#define EXP16 \
	TAIL_MASK                   ; \
	VMOVUPS.Z (SI), K5, Z0 ; \
	VSUBPS    Z16, Z0, Z0  ; \
	EXP(Z0, Z4, Z8, K1)    ; \
	VMOVAPS.Z Z8, K5, Z8

// Adds Z8 to Z11 to the sums in Z12 and Z13.
#define ACCUMULATE64 \
	VADDPS Z8, Z9, Z8    ; \
	VADDPS Z10, Z11, Z10 ; \
	VADDPS Z8, Z10, Z8   ; \
	ACCUMULATE(Z8, Y8)

// func expAVX512(dst, src []float32, m float32) float64
TEXT ·expAVX512(SB), NOSPLIT, $0-64
	MOVQ         dst_base+0(FP), DI
	MOVQ         src_base+24(FP), SI
	MOVQ         src_len+32(FP), CX
	VBROADCASTSS m+48(FP), Z16
	LOAD_CONSTANTS
	VPXORQ       Z12, Z12, Z12
	VPXORQ       Z13, Z13, Z13
	SUBQ         $64, CX
	JLT          tail

loop:
	EXP64
	VMOVUPS Z8, (DI)
	VMOVUPS Z9, 64(DI)
	VMOVUPS Z10, 128(DI)
	VMOVUPS Z11, 192(DI)
	ACCUMULATE64
	ADDQ    $256, SI
	ADDQ    $256, DI
	SUBQ    $64, CX
	JGE     loop

tail:
	ADDQ $64, CX
	JEQ  done

tailLoop:
	EXP16
	VMOVUPS Z8, K5, (DI)
	ACCUMULATE(Z8, Y8)
	ADDQ    $64, SI
	ADDQ    $64, DI
	SUBQ    $16, CX
	JGT     tailLoop

done:
	HORIZONTAL_SUM
	VMOVSD X12, ret+56(FP)
	VZEROUPPER
	RET

// func expSumAVX512(src []float32, m float32) float64
TEXT ·expSumAVX512(SB), NOSPLIT, $0-40
	MOVQ         src_base+0(FP), SI
	MOVQ         src_len+8(FP), CX
	VBROADCASTSS m+24(FP), Z16
	LOAD_CONSTANTS
	VPXORQ       Z12, Z12, Z12
	VPXORQ       Z13, Z13, Z13
	SUBQ         $64, CX
	JLT          tail

loop:
	EXP64
	ACCUMULATE64
	ADDQ $256, SI
	SUBQ $64, CX
	JGE  loop

tail:
	ADDQ $64, CX
	JEQ  done

tailLoop:
	EXP16
	ACCUMULATE(Z8, Y8)
	ADDQ $64, SI
	SUBQ $16, CX
	JGT  tailLoop

done:
	HORIZONTAL_SUM
	VMOVSD X12, ret+32(FP)
	VZEROUPPER
	RET

// func expScaleAVX512(dst, src []float32, m, c float32)
TEXT ·expScaleAVX512(SB), NOSPLIT, $0-56
	MOVQ         dst_base+0(FP), DI
	MOVQ         src_base+24(FP), SI
	MOVQ         src_len+32(FP), CX
	VBROADCASTSS m+48(FP), Z16
	VBROADCASTSS c+52(FP), Z27
	LOAD_CONSTANTS
	SUBQ         $64, CX
	JLT          tail

loop:
	EXP64
	VMULPS  Z27, Z8, Z8
	VMULPS  Z27, Z9, Z9
	VMULPS  Z27, Z10, Z10
	VMULPS  Z27, Z11, Z11
	VMOVUPS Z8, (DI)
	VMOVUPS Z9, 64(DI)
	VMOVUPS Z10, 128(DI)
	VMOVUPS Z11, 192(DI)
	ADDQ    $256, SI
	ADDQ    $256, DI
	SUBQ    $64, CX
	JGE     loop

tail:
	ADDQ $64, CX
	JEQ  done

tailLoop:
	EXP16
	VMULPS  Z27, Z8, Z8
	VMOVUPS Z8, K5, (DI)
	ADDQ    $64, SI
	ADDQ    $64, DI
	SUBQ    $16, CX
	JGT     tailLoop

done:
	VZEROUPPER
	RET

// Rows of whole 64 elements, one after the other: their horizontal sums and maxima overlap in the processor.
// SI points at src, DI at dst, which may be nil, R13 at the column that a row leaves out, DX at its partial.
// R11 = the bytes of a row, R12 counts rows, CX is where in the row.

// K1 to K4 = the lanes of the 64 elements from CX on without column BX, which may be somewhere else.
#define WITHOUT_COLUMN \
	MOVQ     CX, R9      ; \
	SHRQ     $2, R9      ; \
	NEGQ     R9          ; \
	ADDQ     BX, R9      ; \
	XORL     AX, AX      ; \
	BTSQ     R9, AX      ; \
	CMPQ     R9, $64     ; \
	SBBQ     R9, R9      ; \
	ANDQ     R9, AX      ; \
	NOTQ     AX          ; \
	KMOVQ    AX, K1      ; \
	KSHIFTRQ $16, K1, K2 ; \
	KSHIFTRQ $32, K1, K3 ; \
	KSHIFTRQ $48, K1, K4

// Z0 to Z3 = these elements, and -inf in place of the column.
#define LOAD64_WITHOUT_COLUMN \
	VMOVAPS Z27, Z0               ; \
	VMOVAPS Z27, Z1               ; \
	VMOVAPS Z27, Z2               ; \
	VMOVAPS Z27, Z3               ; \
	VMOVUPS (SI)(CX*1), K1, Z0    ; \
	VMOVUPS 64(SI)(CX*1), K2, Z1  ; \
	VMOVUPS 128(SI)(CX*1), K3, Z2 ; \
	VMOVUPS 192(SI)(CX*1), K4, Z3

// func expRowsAVX512(dst, src unsafe.Pointer, n, rows, dstStride, srcStride int, without *int, out *partial)
TEXT ·expRowsAVX512(SB), NOSPLIT, $0-64
	MOVQ         dst+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), R11
	MOVQ         rows+24(FP), R12
	MOVQ         dstStride+32(FP), R8
	MOVQ         srcStride+40(FP), R10
	MOVQ         without+48(FP), R13
	LOAD_CONSTANTS
	MOVQ         out+56(FP), DX
	MOVL         $0xff800000, AX
	VPBROADCASTD AX, Z27
	SHLQ         $2, R11

row:
	MOVQ    (R13), BX
	VMOVAPS Z27, Z28
	VPXORQ  Z12, Z12, Z12
	VPXORQ  Z13, Z13, Z13
	XORL    CX, CX

max:
	WITHOUT_COLUMN
	LOAD64_WITHOUT_COLUMN
	VMAXPS Z0, Z1, Z0
	VMAXPS Z2, Z3, Z2
	VMAXPS Z0, Z2, Z0
	VMAXPS Z0, Z28, Z28
	ADDQ   $256, CX
	CMPQ   CX, R11
	JLT    max

	VEXTRACTF64X4 $1, Z28, Y0
	VMAXPS        Y0, Y28, Y0
	VEXTRACTF128  $1, Y0, X1
	VMAXPS        X0, X1, X0
	VPERMILPS     $0x4e, X0, X1
	VMAXPS        X0, X1, X0
	VPERMILPS     $0xb1, X0, X1
	VMAXPS        X0, X1, X0
	VCVTSS2SD     X0, X0, X1
	VMOVSD        X1, partial_max(DX)
	VBROADCASTSS  X0, Z16
	VCMPPS        $4, Z27, Z16, K5
	VMOVAPS.Z     Z16, K5, Z16
	XORL          CX, CX

exp:
	WITHOUT_COLUMN
	LOAD64_WITHOUT_COLUMN
	VSUBPS Z16, Z0, Z0
	VSUBPS Z16, Z1, Z1
	VSUBPS Z16, Z2, Z2
	VSUBPS Z16, Z3, Z3
	EXP(Z0, Z4, Z8, K5)
	EXP(Z1, Z5, Z9, K6)
	EXP(Z2, Z6, Z10, K5)
	EXP(Z3, Z7, Z11, K6)
	TESTQ  DI, DI
	JEQ    sum
	VMOVUPS Z8, K1, (DI)(CX*1)
	VMOVUPS Z9, K2, 64(DI)(CX*1)
	VMOVUPS Z10, K3, 128(DI)(CX*1)
	VMOVUPS Z11, K4, 192(DI)(CX*1)

sum:
	ACCUMULATE64
	ADDQ $256, CX
	CMPQ CX, R11
	JLT  exp

	HORIZONTAL_SUM
	VMOVSD X12, partial_sum(DX)
	ADDQ   $partial__size, DX
	ADDQ   $8, R13
	ADDQ   R8, DI
	ADDQ   R10, SI
	DECQ   R12
	JNE    row
	VZEROUPPER
	RET
