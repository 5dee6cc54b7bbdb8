//go:build goexperiment.simd

#include "textflag.h"

// func widenFloat16x16(dst *float32, src unsafe.Pointer, n int)
TEXT ·widenFloat16x16(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

loop:
	VCVTPH2PS (SI), Z0
	VMOVUPS   Z0, (DI)
	ADDQ      $32, SI
	ADDQ      $64, DI
	SUBQ      $16, CX
	JNE       loop
	VZEROUPPER
	RET

// func narrowFloat16x16(dst unsafe.Pointer, src *float32, n int, c float32)
TEXT ·narrowFloat16x16(SB), NOSPLIT, $0-28
	MOVQ         dst+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS c+24(FP), Z1

loop:
	VMULPS    (SI), Z1, Z0
	VCVTPS2PH $0, Z0, (DI) // to nearest even
	ADDQ      $64, SI
	ADDQ      $32, DI
	SUBQ      $16, CX
	JNE       loop
	VZEROUPPER
	RET

// func dotFloat16x32(sum *[8]float64, x, y unsafe.Pointer, n int)
TEXT ·dotFloat16x32(SB), NOSPLIT, $0-32
	MOVQ   sum+0(FP), DI
	MOVQ   x+8(FP), SI
	MOVQ   y+16(FP), DX
	MOVQ   n+24(FP), CX
	VPXORQ Z4, Z4, Z4
	VPXORQ Z5, Z5, Z5

loop:
	VCVTPH2PS     (SI), Z0
	VCVTPH2PS     (DX), Z1
	VCVTPH2PS     32(SI), Z2
	VCVTPH2PS     32(DX), Z3
	VMULPS        Z0, Z1, Z0
	VFMADD231PS   Z2, Z3, Z0
	VEXTRACTF64X4 $1, Z0, Y1
	VCVTPS2PD     Y0, Z2
	VCVTPS2PD     Y1, Z3
	VADDPD        Z2, Z4, Z4
	VADDPD        Z3, Z5, Z5
	ADDQ          $64, SI
	ADDQ          $64, DX
	SUBQ          $32, CX
	JNE           loop
	VADDPD        Z4, Z5, Z4
	VMOVUPD       Z4, (DI)
	VZEROUPPER
	RET

// func softmaxGradFloat16x16(dst, dy, y unsafe.Pointer, n int, d float32)
TEXT ·softmaxGradFloat16x16(SB), NOSPLIT, $0-36
	MOVQ         dst+0(FP), DI
	MOVQ         dy+8(FP), SI
	MOVQ         y+16(FP), DX
	MOVQ         n+24(FP), CX
	VBROADCASTSS d+32(FP), Z2

loop:
	VCVTPH2PS (SI), Z0
	VCVTPH2PS (DX), Z1
	VSUBPS    Z2, Z0, Z0
	VMULPS    Z0, Z1, Z0
	VCVTPS2PH $0, Z0, (DI)
	ADDQ      $32, SI
	ADDQ      $32, DX
	ADDQ      $32, DI
	SUBQ      $16, CX
	JNE       loop
	VZEROUPPER
	RET
