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

// func widenFloat16x8(dst *float32, src unsafe.Pointer, n int)
TEXT ·widenFloat16x8(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

loop:
	VCVTPH2PS (SI), Y0
	VMOVUPS   Y0, (DI)
	ADDQ      $16, SI
	ADDQ      $32, DI
	SUBQ      $8, CX
	JNE       loop
	VZEROUPPER
	RET

// func narrowFloat16x8(dst unsafe.Pointer, src *float32, n int, c float32)
TEXT ·narrowFloat16x8(SB), NOSPLIT, $0-28
	MOVQ         dst+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS c+24(FP), Y1

loop:
	VMULPS    (SI), Y1, Y0
	VCVTPS2PH $0, Y0, (DI) // to nearest even
	ADDQ      $32, SI
	ADDQ      $16, DI
	SUBQ      $8, CX
	JNE       loop
	VZEROUPPER
	RET
