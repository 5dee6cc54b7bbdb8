//go:build goexperiment.simd

#include "go_asm.h"
#include "row_amd64.h"
#include "textflag.h"

// Softmax backward, directly on rows in memory. SI points at dy, DX at y, DI at dst. CX counts elements.

// dy = ((dy - hi) - lo) * y
#define GRADIENT(dy, y) \
	VSUBPS Z30, dy, dy ; \
	VSUBPS Z31, dy, dy ; \
	VMULPS y, dy, dy

// Broadcasts hi and lo to the registers a and b. R10 = stream.
#define GRADIENT_ARGUMENTS(a, b) \
	MOVQ         dst+0(FP), DI  ; \
	MOVQ         dy+8(FP), SI   ; \
	MOVQ         y+16(FP), DX   ; \
	MOVQ         n+24(FP), CX   ; \
	VBROADCASTSS hi+32(FP), a   ; \
	VBROADCASTSS lo+36(FP), b   ; \
	MOVBQZX      stream+40(FP), R10

#define DOT_ARGUMENTS \
	MOVQ   x+0(FP), SI   ; \
	MOVQ   y+8(FP), DX   ; \
	MOVQ   n+16(FP), CX  ; \
	VPXORQ Z12, Z12, Z12 ; \
	VPXORQ Z13, Z13, Z13

// Rows of whole 64 elements, from the sum to the gradient. A call for each row and the return to Go between
// its two passes would take longer than the row. R11 = the bytes of a row, R12 counts rows, CX is where in
// the row.

#define ROWS_ARGUMENTS \
	MOVQ dst+0(FP), DI        ; \
	MOVQ dy+8(FP), SI         ; \
	MOVQ y+16(FP), DX         ; \
	MOVQ n+24(FP), R11        ; \
	MOVQ rows+32(FP), R12     ; \
	MOVQ dstStride+40(FP), R8 ; \
	MOVQ dyStride+48(FP), R9  ; \
	MOVQ yStride+56(FP), R10  ; \
	SHLQ $2, R11

#define NEXT_ROW \
	ADDQ R8, DI  ; \
	ADDQ R9, SI  ; \
	ADDQ R10, DX ; \
	DECQ R12

// From the sum in X12, X0 = it in float32, and X2 = the rest if that is finite, else 0: see splitFloat.
#define SPLIT_SUM \
	VCVTSD2SS X12, X12, X0   ; \
	VCVTSS2SD X0, X0, X1     ; \
	VSUBSD    X1, X12, X1    ; \
	VCVTSD2SS X1, X1, X2     ; \
	VSUBSS    X2, X2, X3     ; \
	VCMPSS    $7, X3, X3, X3 ; \
	VANDPS    X3, X2, X2

// X12 = the sum of Y12's lanes, in the order of sum4.
#define SUM4 \
	VHADDPD      Y12, Y12, Y12 ; \
	VEXTRACTF128 $1, Y12, X13  ; \
	VADDSD       X13, X12, X12

#define WIDEN_BFLOAT16(z) VPSLLD $16, z, z

// Converts 32 bfloat16 at p to float32: those with even indices, and those with odd ones. This takes half the
// instructions of a conversion in order, and the code below works in any order.
#define WIDEN_PAIRS(p, even, odd) \
	VPSLLD $16, p, even ; \
	VPANDD p, Z26, odd

#define LOAD_HIGH_HALF_MASK \
	MOVL         $0xffff0000, R8 ; \
	VPBROADCASTD R8, Z26

// func dotBFloat16AVX512(x, y unsafe.Pointer, n int) float64
TEXT ·dotBFloat16AVX512(SB), NOSPLIT, $0-32
	DOT_ARGUMENTS
	LOAD_HIGH_HALF_MASK
	SUBQ $64, CX
	JLT  tail

loop:
	WIDEN_PAIRS((SI), Z0, Z1)
	WIDEN_PAIRS((DX), Z4, Z5)
	WIDEN_PAIRS(64(SI), Z2, Z3)
	WIDEN_PAIRS(64(DX), Z6, Z7)
	VMULPS      Z0, Z4, Z0
	VMULPS      Z1, Z5, Z1
	VFMADD231PS Z2, Z6, Z0
	VFMADD231PS Z3, Z7, Z1
	VADDPS      Z0, Z1, Z0
	ACCUMULATE(Z0, Y0)
	ADDQ        $128, SI
	ADDQ        $128, DX
	SUBQ        $64, CX
	JGE         loop

tail:
	ADDQ $64, CX
	JEQ  done

tailLoop:
	TAIL_MASK
	VPMOVZXWD.Z (SI), K5, Z0
	VPMOVZXWD.Z (DX), K5, Z4
	WIDEN_BFLOAT16(Z0)
	WIDEN_BFLOAT16(Z4)
	VMULPS      Z0, Z4, Z0
	ACCUMULATE(Z0, Y0)
	ADDQ        $32, SI
	ADDQ        $32, DX
	SUBQ        $16, CX
	JGT         tailLoop

done:
	HORIZONTAL_SUM
	VMOVSD X12, ret+24(FP)
	VZEROUPPER
	RET

// func dotFloat16AVX512(x, y unsafe.Pointer, n int) float64
TEXT ·dotFloat16AVX512(SB), NOSPLIT, $0-32
	DOT_ARGUMENTS
	SUBQ $64, CX
	JLT  tail

loop:
	VCVTPH2PS   (SI), Z0
	VCVTPH2PS   (DX), Z4
	VCVTPH2PS   32(SI), Z1
	VCVTPH2PS   32(DX), Z5
	VCVTPH2PS   64(SI), Z2
	VCVTPH2PS   64(DX), Z6
	VCVTPH2PS   96(SI), Z3
	VCVTPH2PS   96(DX), Z7
	VMULPS      Z0, Z4, Z0
	VMULPS      Z1, Z5, Z1
	VFMADD231PS Z2, Z6, Z0
	VFMADD231PS Z3, Z7, Z1
	VADDPS      Z0, Z1, Z0
	ACCUMULATE(Z0, Y0)
	ADDQ        $128, SI
	ADDQ        $128, DX
	SUBQ        $64, CX
	JGE         loop

tail:
	ADDQ $64, CX
	JEQ  done

tailLoop:
	TAIL_MASK
	VCVTPH2PS.Z (SI), K5, Z0
	VCVTPH2PS.Z (DX), K5, Z4
	VMULPS      Z0, Z4, Z0
	ACCUMULATE(Z0, Y0)
	ADDQ        $32, SI
	ADDQ        $32, DX
	SUBQ        $16, CX
	JGT         tailLoop

done:
	HORIZONTAL_SUM
	VMOVSD X12, ret+24(FP)
	VZEROUPPER
	RET

// With stream, the gradient is written past the cache, and dst must be aligned to 64 bytes. The functions for
// 16-bit rows prefetch the next row, which usually follows this one in memory: while they convert and store,
// they issue few loads.

// func softmaxGradFloat32AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
TEXT ·softmaxGradFloat32AVX512(SB), NOSPLIT, $0-41
	GRADIENT_ARGUMENTS(Z30, Z31)
	SUBQ $32, CX
	JLT tail

loop:
	VMOVUPS (SI), Z0
	VMOVUPS 64(SI), Z1
	GRADIENT(Z0, (DX))
	GRADIENT(Z1, 64(DX))
	TESTQ R10, R10
	JNE stream
	VMOVUPS Z0, (DI)
	VMOVUPS Z1, 64(DI)
	JMP next

stream:
	VMOVNTPS Z0, (DI)
	VMOVNTPS Z1, 64(DI)

next:
	ADDQ $128, SI
	ADDQ $128, DX
	ADDQ $128, DI
	SUBQ $32, CX
	JGE loop

tail:
	ADDQ $32, CX
	JEQ done

tailLoop:
	TAIL_MASK
	VMOVUPS.Z (SI), K5, Z0
	VMOVUPS.Z (DX), K5, Z1
	GRADIENT(Z0, Z1)
	VMOVUPS Z0, K5, (DI)
	ADDQ $64, SI
	ADDQ $64, DX
	ADDQ $64, DI
	SUBQ $16, CX
	JGT tailLoop

done:
	FENCE(R10)
	VZEROUPPER
	RET

// func softmaxGradFloat32AVX2(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
TEXT ·softmaxGradFloat32AVX2(SB), NOSPLIT, $0-41
	GRADIENT_ARGUMENTS(Y4, Y5)
	SUBQ $16, CX
	JLT  tail

loop:
	VMOVUPS (SI), Y0
	VMOVUPS 32(SI), Y1
	VSUBPS  Y4, Y0, Y0
	VSUBPS  Y4, Y1, Y1
	VSUBPS  Y5, Y0, Y0
	VSUBPS  Y5, Y1, Y1
	VMULPS  (DX), Y0, Y0
	VMULPS  32(DX), Y1, Y1
	TESTQ   R10, R10
	JNE     stream
	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	JMP     next

stream:
	VMOVNTPS Y0, (DI)
	VMOVNTPS Y1, 32(DI)

next:
	ADDQ $64, SI
	ADDQ $64, DX
	ADDQ $64, DI
	SUBQ $16, CX
	JGE  loop

tail:
	ADDQ $16, CX
	JEQ  done

tailLoop:
	VMOVSS (SI), X0
	VSUBSS X4, X0, X0
	VSUBSS X5, X0, X0
	VMULSS (DX), X0, X0
	VMOVSS X0, (DI)
	ADDQ   $4, SI
	ADDQ   $4, DX
	ADDQ   $4, DI
	DECQ   CX
	JNE    tailLoop

done:
	FENCE(R10)
	VZEROUPPER
	RET

// func softmaxGradBFloat16AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
TEXT ·softmaxGradBFloat16AVX512(SB), NOSPLIT, $0-41
	GRADIENT_ARGUMENTS(Z30, Z31)
	BFLOAT16_CONSTANTS(R8)
	LOAD_HIGH_HALF_MASK
	MOVL $0xaaaaaaaa, R8
	KMOVD R8, K2
	LEAQ (SI)(CX*2), R8
	LEAQ (DX)(CX*2), R9
	SUBQ $32, CX
	JLT tail

loop:
	WIDEN_PAIRS((SI), Z0, Z2)
	WIDEN_PAIRS((DX), Z1, Z3)
	GRADIENT(Z0, Z1)
	GRADIENT(Z2, Z3)
	ROUND_BFLOAT16(Z0, Z4, K1)
	ROUND_BFLOAT16(Z2, Z4, K1)
	VPSRLD $16, Z0, Z0
	VMOVDQU16 Z2, K2, Z0
	TESTQ R10, R10
	JNE stream
	VMOVUPS Z0, (DI)
	JMP next

stream:
	VMOVNTPS Z0, (DI)

next:
	PREFETCHT0 (R8)
	PREFETCHT0 (R9)
	ADDQ $64, SI
	ADDQ $64, DX
	ADDQ $64, DI
	ADDQ $64, R8
	ADDQ $64, R9
	SUBQ $32, CX
	JGE loop

tail:
	ADDQ $32, CX
	JEQ done

tailLoop:
	TAIL_MASK
	VPMOVZXWD.Z (SI), K5, Z0
	VPMOVZXWD.Z (DX), K5, Z1
	WIDEN_BFLOAT16(Z0)
	WIDEN_BFLOAT16(Z1)
	GRADIENT(Z0, Z1)
	ROUND_BFLOAT16(Z0, Z4, K1)
	VPSRLD $16, Z0, Z0
	VPMOVDW Z0, K5, (DI)
	ADDQ $32, SI
	ADDQ $32, DX
	ADDQ $32, DI
	SUBQ $16, CX
	JGT tailLoop

done:
	FENCE(R10)
	VZEROUPPER
	RET

// func softmaxGradFloat16AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
TEXT ·softmaxGradFloat16AVX512(SB), NOSPLIT, $0-41
	GRADIENT_ARGUMENTS(Z30, Z31)
	LEAQ (SI)(CX*2), R8
	LEAQ (DX)(CX*2), R9
	SUBQ $32, CX
	JLT tail

loop:
	VCVTPH2PS (SI), Z0
	VCVTPH2PS (DX), Z1
	VCVTPH2PS 32(SI), Z2
	VCVTPH2PS 32(DX), Z3
	GRADIENT(Z0, Z1)
	GRADIENT(Z2, Z3)
	VCVTPS2PH $0, Z0, Y0 // to nearest even
	VCVTPS2PH $0, Z2, Y2
	VINSERTI64X4 $1, Y2, Z0, Z0
	TESTQ R10, R10
	JNE stream
	VMOVUPS Z0, (DI)
	JMP next

stream:
	VMOVNTPS Z0, (DI)

next:
	PREFETCHT0 (R8)
	PREFETCHT0 (R9)
	ADDQ $64, SI
	ADDQ $64, DX
	ADDQ $64, DI
	ADDQ $64, R8
	ADDQ $64, R9
	SUBQ $32, CX
	JGE loop

tail:
	ADDQ $32, CX
	JEQ done

tailLoop:
	TAIL_MASK
	VCVTPH2PS.Z (SI), K5, Z0
	VCVTPH2PS.Z (DX), K5, Z1
	GRADIENT(Z0, Z1)
	VCVTPS2PH $0, Z0, K5, (DI)
	ADDQ $32, SI
	ADDQ $32, DX
	ADDQ $32, DI
	SUBQ $16, CX
	JGT tailLoop

done:
	FENCE(R10)
	VZEROUPPER
	RET

// func softmaxGradRowsAVX512(dst, dy, y unsafe.Pointer, n, rows, dstStride, dyStride, yStride int)
TEXT ·softmaxGradRowsAVX512(SB), NOSPLIT, $0-64
	ROWS_ARGUMENTS

row:
	VPXORQ Z12, Z12, Z12
	VPXORQ Z13, Z13, Z13
	XORL   CX, CX

dot:
	VMOVUPS     (SI)(CX*1), Z0
	VMOVUPS     64(SI)(CX*1), Z1
	VMOVUPS     128(SI)(CX*1), Z2
	VMOVUPS     192(SI)(CX*1), Z3
	VMULPS      (DX)(CX*1), Z0, Z0
	VMULPS      64(DX)(CX*1), Z1, Z1
	VFMADD231PS 128(DX)(CX*1), Z2, Z0
	VFMADD231PS 192(DX)(CX*1), Z3, Z1
	VADDPS      Z1, Z0, Z0
	ACCUMULATE(Z0, Y0)
	ADDQ        $256, CX
	CMPQ        CX, R11
	JLT         dot

	VADDPD        Z13, Z12, Z12
	VEXTRACTF64X4 $1, Z12, Y13
	VADDPD        Y13, Y12, Y12
	SUM4
	SPLIT_SUM
	VBROADCASTSS  X0, Z30
	VBROADCASTSS  X2, Z31
	XORL          CX, CX

gradient:
	VMOVUPS (SI)(CX*1), Z0
	VMOVUPS 64(SI)(CX*1), Z1
	VMOVUPS 128(SI)(CX*1), Z2
	VMOVUPS 192(SI)(CX*1), Z3
	GRADIENT(Z0, (DX)(CX*1))
	GRADIENT(Z1, 64(DX)(CX*1))
	GRADIENT(Z2, 128(DX)(CX*1))
	GRADIENT(Z3, 192(DX)(CX*1))
	VMOVUPS Z0, (DI)(CX*1)
	VMOVUPS Z1, 64(DI)(CX*1)
	VMOVUPS Z2, 128(DI)(CX*1)
	VMOVUPS Z3, 192(DI)(CX*1)
	ADDQ    $256, CX
	CMPQ    CX, R11
	JLT     gradient
	NEXT_ROW
	JNE     row
	VZEROUPPER
	RET

// func softmaxGradRowsAVX2(dst, dy, y unsafe.Pointer, n, rows, dstStride, dyStride, yStride int)
TEXT ·softmaxGradRowsAVX2(SB), NOSPLIT, $0-64
	ROWS_ARGUMENTS

row:
	VXORPD Y12, Y12, Y12
	VXORPD Y13, Y13, Y13
	XORL   CX, CX

dot:
	VMOVUPS      (SI)(CX*1), Y0
	VMOVUPS      32(SI)(CX*1), Y1
	VMOVUPS      64(SI)(CX*1), Y2
	VMOVUPS      96(SI)(CX*1), Y3
	VMULPS       (DX)(CX*1), Y0, Y0
	VMULPS       32(DX)(CX*1), Y1, Y1
	VFMADD231PS  64(DX)(CX*1), Y2, Y0
	VFMADD231PS  96(DX)(CX*1), Y3, Y1
	VADDPS       Y1, Y0, Y0
	VEXTRACTF128 $1, Y0, X1
	VCVTPS2PD    X0, Y2
	VCVTPS2PD    X1, Y3
	VADDPD       Y2, Y12, Y12
	VADDPD       Y3, Y13, Y13
	ADDQ         $128, CX
	CMPQ         CX, R11
	JLT          dot

	VADDPD       Y13, Y12, Y12
	SUM4
	SPLIT_SUM
	VBROADCASTSS X0, Y4
	VBROADCASTSS X2, Y5
	XORL         CX, CX

gradient:
	VMOVUPS (SI)(CX*1), Y0
	VMOVUPS 32(SI)(CX*1), Y1
	VSUBPS  Y4, Y0, Y0
	VSUBPS  Y4, Y1, Y1
	VSUBPS  Y5, Y0, Y0
	VSUBPS  Y5, Y1, Y1
	VMULPS  (DX)(CX*1), Y0, Y0
	VMULPS  32(DX)(CX*1), Y1, Y1
	VMOVUPS Y0, (DI)(CX*1)
	VMOVUPS Y1, 32(DI)(CX*1)
	ADDQ    $64, CX
	CMPQ    CX, R11
	JLT     gradient
	NEXT_ROW
	JNE     row
	VZEROUPPER
	RET
