//go:build goexperiment.simd

#include "textflag.h"

// Conversions between float16 and float32. BYTES is the size of a vector in float16, v and c are registers.

#define WIDEN(BYTES, v) \
	MOVQ dst+0(FP), DI      ; \
	MOVQ src+8(FP), SI      ; \
	MOVQ n+16(FP), CX       ; \
loop:                       ; \
	VCVTPH2PS (SI), v       ; \
	VMOVUPS   v, (DI)       ; \
	ADDQ      $BYTES, SI    ; \
	ADDQ      $2*BYTES, DI  ; \
	SUBQ      $(BYTES/2), CX ; \
	JNE       loop          ; \
	VZEROUPPER              ; \
	RET

// Rounds to nearest even.
#define NARROW(BYTES, v, c) \
	MOVQ         dst+0(FP), DI ; \
	MOVQ         src+8(FP), SI ; \
	MOVQ         n+16(FP), CX  ; \
	VBROADCASTSS factor+24(FP), c  ; \
loop:                          ; \
	VMULPS    (SI), c, v       ; \
	VCVTPS2PH $0, v, (DI)      ; \
	ADDQ      $2*BYTES, SI     ; \
	ADDQ      $BYTES, DI       ; \
	SUBQ      $(BYTES/2), CX   ; \
	JNE       loop             ; \
	VZEROUPPER                 ; \
	RET

// func widenFloat16x16(dst *float32, src unsafe.Pointer, n int)
TEXT ·widenFloat16x16(SB), NOSPLIT, $0-24
	WIDEN(32, Z0)

// func narrowFloat16x16(dst unsafe.Pointer, src *float32, n int, factor float32)
TEXT ·narrowFloat16x16(SB), NOSPLIT, $0-28
	NARROW(32, Z0, Z1)

// func widenFloat16x8(dst *float32, src unsafe.Pointer, n int)
TEXT ·widenFloat16x8(SB), NOSPLIT, $0-24
	WIDEN(16, Y0)

// func narrowFloat16x8(dst unsafe.Pointer, src *float32, n int, factor float32)
TEXT ·narrowFloat16x8(SB), NOSPLIT, $0-28
	NARROW(16, Y0, Y1)
