//go:build goexperiment.simd

#include "go_asm.h"
#include "textflag.h"

// Rows of bfloat16 for AVX2, for a number of elements that is a positive multiple of 16. The Go compiler
// loads constants again and again, and has no instruction that blends words.

// Rounds numbers to bfloat16, in the high half of each lane. A NaN needs zeros in its low half: then there is
// no carry. Y11 is 1, Y10 0x7fff. t is overwritten.
#define ROUND8(z, t) \
	VPSRLD $16, z, t  ; \
	VPAND  Y11, t, t  ; \
	VPADDD Y10, z, z  ; \
	VPADDD t, z, z

// func softmaxGrad16sBFloat16AVX2(dst, dy, y unsafe.Pointer, n int, hi, lo float32)
// Elements with even indices and those with odd ones are converted apart. Every NaN comes from a bfloat16, or
// from the processor: its low half is 0.
TEXT ·softmaxGrad16sBFloat16AVX2(SB), NOSPLIT, $0-40
	MOVQ         dst+0(FP), DI
	MOVQ         dy+8(FP), SI
	MOVQ         y+16(FP), DX
	MOVQ         n+24(FP), CX
	VBROADCASTSS hi+32(FP), Y14
	VBROADCASTSS lo+36(FP), Y15
	MOVQ         ·simdConstants(SB), R8
	VMOVUPS      constants_bit0(R8), Y11
	VMOVUPS      constants_bfloat16Half(R8), Y10
	VMOVUPS      constants_highHalf(R8), Y9

loop:
	VMOVUPS  (SI), Y0
	VMOVUPS  (DX), Y1
	VPSLLD   $16, Y0, Y2
	VPAND    Y9, Y0, Y0
	VPSLLD   $16, Y1, Y3
	VPAND    Y9, Y1, Y1
	VSUBPS   Y14, Y2, Y2
	VSUBPS   Y14, Y0, Y0
	VSUBPS   Y15, Y2, Y2
	VSUBPS   Y15, Y0, Y0
	VMULPS   Y3, Y2, Y2
	VMULPS   Y1, Y0, Y0
	ROUND8(Y2, Y4)
	ROUND8(Y0, Y5)
	VPSRLD   $16, Y2, Y2
	VPBLENDW $0xaa, Y0, Y2, Y2
	VMOVUPS  Y2, (DI)
	ADDQ     $32, SI
	ADDQ     $32, DX
	ADDQ     $32, DI
	SUBQ     $16, CX
	JG       loop
	VZEROUPPER
	RET

// Replaces z by the NaN in Y9 where it is NaN, else as ROUND8. k is overwritten too.
#define ROUND_ANY8(z, t, k) \
	VCMPPS    $3, z, z, k   ; \
	ROUND8(z, t)            ; \
	VBLENDVPS k, Y9, z, z   ; \
	VPSRLD    $16, z, z

// func store16sBFloat16AVX2(dst, src unsafe.Pointer, n int, c float32)
TEXT ·store16sBFloat16AVX2(SB), NOSPLIT, $0-28
	MOVQ         dst+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS c+24(FP), Y14
	MOVQ         ·simdConstants(SB), R8
	VMOVUPS      constants_bit0(R8), Y11
	VMOVUPS      constants_bfloat16Half(R8), Y10
	VMOVUPS      constants_bfloat16NaN(R8), Y9

loop:
	VMULPS    (SI), Y14, Y0
	VMULPS    32(SI), Y14, Y1
	ROUND_ANY8(Y0, Y2, Y4)
	ROUND_ANY8(Y1, Y3, Y5)
	VPACKUSDW Y1, Y0, Y0
	VPERMQ    $0xd8, Y0, Y0
	VMOVUPS   Y0, (DI)
	ADDQ      $64, SI
	ADDQ      $32, DI
	SUBQ      $16, CX
	JG        loop
	VZEROUPPER
	RET
