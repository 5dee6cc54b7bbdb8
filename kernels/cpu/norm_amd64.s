//go:build goexperiment.simd

#include "go_asm.h"
#include "row_amd64.h"
#include "textflag.h"

// RMSNorm, directly on rows in memory. Elements of 16 bits are widened in order, because weights and sums lie
// beside them in float32. CX counts elements, and a vector is 16 of them. While a row is written, the one
// that usually follows it in memory is prefetched.

// Widens the 16 elements at p to z, for tails only those that K5 selects.
#define LOAD_BF16(p, z) \
	VPMOVZXWD p, z      ; \
	VPSLLD    $16, z, z

#define LOAD_BF16_TAIL(p, z) \
	VPMOVZXWD.Z p, K5, z  ; \
	VPSLLD      $16, z, z

#define LOAD_F16(p, z) VCVTPH2PS p, z

#define LOAD_F16_TAIL(p, z) VCVTPH2PS.Z p, K5, z

#define LOAD_F32(p, z) VMOVUPS p, z

#define LOAD_F32_TAIL(p, z) VMOVUPS.Z p, K5, z

// Rounds the lanes of z to nearest even and stores them at p. z, t and k are overwritten.
#define STORE_BF16(z, t, k, p) \
	ROUND_BFLOAT16(z, t, k) ; \
	VPSRLD  $16, z, z       ; \
	VPMOVDW z, p

#define STORE_BF16_TAIL(z, t, k, p) \
	ROUND_BFLOAT16(z, t, k) ; \
	VPSRLD  $16, z, z       ; \
	VPMOVDW z, K5, p

#define STORE_F16(z, t, k, p) VCVTPS2PH $0, z, p

#define STORE_F16_TAIL(z, t, k, p) VCVTPS2PH $0, z, K5, p

#define STORE_F32(z, t, k, p) VMOVUPS z, p

#define STORE_F32_TAIL(z, t, k, p) VMOVUPS z, K5, p

// Like STORE, but past the cache. p must be aligned to its vector. Z5 is overwritten.
#define STREAM_BF16(z, t, k, p) \
	ROUND_BFLOAT16(z, t, k) ; \
	VPSRLD   $16, z, z      ; \
	VPMOVDW  z, Y5          ; \
	VMOVNTDQ Y5, p

#define STREAM_F16(z, t, k, p) \
	VCVTPS2PH $0, z, Y5 ; \
	VMOVNTDQ  Y5, p

#define STREAM_F32(z, t, k, p) VMOVNTPS z, p

#define NO_CONSTANTS

// dst = x * c * w. DI, SI and DX point at dst, x and w. VECTOR and ELEMENT are the bytes of x.
#define SCALE(VECTOR, ELEMENT, CONSTANTS, LOAD, LOAD_TAIL, STORE, STREAM, STORE_TAIL) \
	MOVQ         dst+0(FP), DI       ; \
	MOVQ         x+8(FP), SI         ; \
	MOVQ         w_base+16(FP), DX   ; \
	MOVQ         w_len+24(FP), CX    ; \
	VBROADCASTSS c+40(FP), Z30       ; \
	MOVBQZX      stream+44(FP), R9   ; \
	CONSTANTS                        ; \
	LEAQ         (SI)(CX*ELEMENT), R8 ; \
	SUBQ         $32, CX             ; \
	JLT          tail                ; \
loop:                                ; \
	LOAD((SI), Z0)                   ; \
	LOAD(VECTOR(SI), Z1)             ; \
	VMULPS       Z30, Z0, Z0         ; \
	VMULPS       Z30, Z1, Z1         ; \
	VMULPS       (DX), Z0, Z0        ; \
	VMULPS       64(DX), Z1, Z1      ; \
	TESTQ        R9, R9              ; \
	JNE          stream              ; \
	STORE(Z0, Z2, K1, (DI))          ; \
	STORE(Z1, Z3, K2, VECTOR(DI))    ; \
	JMP          next                ; \
stream:                              ; \
	STREAM(Z0, Z2, K1, (DI))         ; \
	STREAM(Z1, Z3, K2, VECTOR(DI))   ; \
next:                                ; \
	PREFETCHT0   (R8)                ; \
	PREFETCHT0   VECTOR(R8)          ; \
	ADDQ         $(2*VECTOR), R8     ; \
	ADDQ         $(2*VECTOR), SI     ; \
	ADDQ         $128, DX            ; \
	ADDQ         $(2*VECTOR), DI     ; \
	SUBQ         $32, CX             ; \
	JGE          loop                ; \
tail:                                ; \
	ADDQ         $32, CX             ; \
	JEQ          done                ; \
tailLoop:                            ; \
	TAIL_MASK                        ; \
	LOAD_TAIL((SI), Z0)              ; \
	VMOVUPS.Z    (DX), K5, Z1        ; \
	VMULPS       Z30, Z0, Z0         ; \
	VMULPS       Z1, Z0, Z0          ; \
	STORE_TAIL(Z0, Z2, K1, (DI))     ; \
	ADDQ         $VECTOR, SI         ; \
	ADDQ         $64, DX             ; \
	ADDQ         $VECTOR, DI         ; \
	SUBQ         $16, CX             ; \
	JGT          tailLoop            ; \
done:                                ; \
	FENCE(R9)                        ; \
	VZEROUPPER                       ; \
	RET

// The sum of x * dy * w. SI, DX and R8 point at x, dy and w.
#define DOT3(LOAD, LOAD_TAIL) \
	MOVQ   x+0(FP), SI         ; \
	MOVQ   dy+8(FP), DX        ; \
	MOVQ   w_base+16(FP), R8   ; \
	MOVQ   w_len+24(FP), CX    ; \
	VPXORQ Z12, Z12, Z12       ; \
	VPXORQ Z13, Z13, Z13       ; \
	SUBQ   $64, CX             ; \
	JLT    tail                ; \
loop:                          ; \
	LOAD((SI), Z0)             ; \
	LOAD((DX), Z1)             ; \
	LOAD(32(SI), Z2)           ; \
	LOAD(32(DX), Z3)           ; \
	LOAD(64(SI), Z4)           ; \
	LOAD(64(DX), Z5)           ; \
	LOAD(96(SI), Z6)           ; \
	LOAD(96(DX), Z7)           ; \
	VMULPS      Z0, Z1, Z0     ; \
	VMULPS      Z2, Z3, Z2     ; \
	VMULPS      Z4, Z5, Z4     ; \
	VMULPS      Z6, Z7, Z6     ; \
	VMULPS      (R8), Z0, Z0   ; \
	VMULPS      64(R8), Z2, Z2 ; \
	VFMADD231PS 128(R8), Z4, Z0 ; \
	VFMADD231PS 192(R8), Z6, Z2 ; \
	VADDPS      Z0, Z2, Z0     ; \
	ACCUMULATE(Z0, Y0)         ; \
	ADDQ        $128, SI       ; \
	ADDQ        $128, DX       ; \
	ADDQ        $256, R8       ; \
	SUBQ        $64, CX        ; \
	JGE         loop           ; \
tail:                          ; \
	ADDQ $64, CX               ; \
	JEQ  done                  ; \
tailLoop:                      ; \
	TAIL_MASK                  ; \
	LOAD_TAIL((SI), Z0)        ; \
	LOAD_TAIL((DX), Z1)        ; \
	VMOVUPS.Z (R8), K5, Z2     ; \
	VMULPS    Z0, Z1, Z0       ; \
	VMULPS    Z2, Z0, Z0       ; \
	ACCUMULATE(Z0, Y0)         ; \
	ADDQ      $32, SI          ; \
	ADDQ      $32, DX          ; \
	ADDQ      $64, R8          ; \
	SUBQ      $16, CX          ; \
	JGT       tailLoop         ; \
done:                          ; \
	HORIZONTAL_SUM             ; \
	VMOVSD X12, ret+40(FP)     ; \
	VZEROUPPER                 ; \
	RET

// dx = (dy * w - x * k) * r, and sums += x * r * dy unless sums is nil. DI, SI, DX, R8 and R9 point at dx, x,
// dy, w and sums.
#define GRADIENT(CONSTANTS, LOAD, LOAD_TAIL, STORE, STORE_TAIL) \
	MOVQ         dx+0(FP), DI         ; \
	MOVQ         x+8(FP), SI          ; \
	MOVQ         dy+16(FP), DX        ; \
	MOVQ         w_base+24(FP), R8    ; \
	MOVQ         w_len+32(FP), CX     ; \
	MOVQ         sums_base+48(FP), R9 ; \
	VBROADCASTSS k+72(FP), Z30        ; \
	VBROADCASTSS r+76(FP), Z31        ; \
	CONSTANTS                         ; \
	LEAQ         (SI)(CX*2), R11      ; \
	LEAQ         (DX)(CX*2), R12      ; \
	SUBQ         $16, CX              ; \
	JLT          tail                 ; \
loop:                                 ; \
	LOAD((SI), Z0)                    ; \
	LOAD((DX), Z1)                    ; \
	VMULPS       (R8), Z1, Z2         ; \
	VFNMADD231PS Z30, Z0, Z2          ; \
	VMULPS       Z31, Z2, Z2          ; \
	TESTQ        R9, R9               ; \
	JEQ          store                ; \
	VMULPS       Z31, Z0, Z0          ; \
	VFMADD213PS  (R9), Z1, Z0         ; \
	VMOVUPS      Z0, (R9)             ; \
	ADDQ         $64, R9              ; \
store:                                ; \
	STORE(Z2, Z3, K1, (DI))           ; \
	PREFETCHT0   (R11)                ; \
	PREFETCHT0   (R12)                ; \
	ADDQ         $32, R11             ; \
	ADDQ         $32, R12             ; \
	ADDQ         $32, SI              ; \
	ADDQ         $32, DX              ; \
	ADDQ         $32, DI              ; \
	ADDQ         $64, R8              ; \
	SUBQ         $16, CX              ; \
	JGE          loop                 ; \
tail:                                 ; \
	ADDQ         $16, CX              ; \
	JEQ          done                 ; \
	TAIL_MASK                         ; \
	LOAD_TAIL((SI), Z0)               ; \
	LOAD_TAIL((DX), Z1)               ; \
	VMOVUPS.Z    (R8), K5, Z2         ; \
	VMULPS       Z1, Z2, Z2           ; \
	VFNMADD231PS Z30, Z0, Z2          ; \
	VMULPS       Z31, Z2, Z2          ; \
	TESTQ        R9, R9               ; \
	JEQ          storeTail            ; \
	VMULPS       Z31, Z0, Z0          ; \
	VMOVUPS.Z    (R9), K5, Z4         ; \
	VFMADD213PS  Z4, Z1, Z0           ; \
	VMOVUPS      Z0, K5, (R9)         ; \
storeTail:                            ; \
	STORE_TAIL(Z2, Z3, K1, (DI))      ; \
done:                                 ; \
	VZEROUPPER                        ; \
	RET

// func scaleBFloat16AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)
TEXT ·scaleBFloat16AVX512(SB), NOSPLIT, $0-45
	SCALE(32, 2, BFLOAT16_CONSTANTS(R10), LOAD_BF16, LOAD_BF16_TAIL, STORE_BF16, STREAM_BF16, STORE_BF16_TAIL)

// func scaleFloat16AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)
TEXT ·scaleFloat16AVX512(SB), NOSPLIT, $0-45
	SCALE(32, 2, NO_CONSTANTS, LOAD_F16, LOAD_F16_TAIL, STORE_F16, STREAM_F16, STORE_F16_TAIL)

// func scaleFloat32AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)
TEXT ·scaleFloat32AVX512(SB), NOSPLIT, $0-45
	SCALE(64, 4, NO_CONSTANTS, LOAD_F32, LOAD_F32_TAIL, STORE_F32, STREAM_F32, STORE_F32_TAIL)

// func dot3BFloat16AVX512(x, dy unsafe.Pointer, w []float32) float64
TEXT ·dot3BFloat16AVX512(SB), NOSPLIT, $0-48
	DOT3(LOAD_BF16, LOAD_BF16_TAIL)

// func dot3Float16AVX512(x, dy unsafe.Pointer, w []float32) float64
TEXT ·dot3Float16AVX512(SB), NOSPLIT, $0-48
	DOT3(LOAD_F16, LOAD_F16_TAIL)

// func rmsNormGradBFloat16AVX512(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32)
TEXT ·rmsNormGradBFloat16AVX512(SB), NOSPLIT, $0-80
	GRADIENT(BFLOAT16_CONSTANTS(R10), LOAD_BF16, LOAD_BF16_TAIL, STORE_BF16, STORE_BF16_TAIL)

// func rmsNormGradFloat16AVX512(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32)
TEXT ·rmsNormGradFloat16AVX512(SB), NOSPLIT, $0-80
	GRADIENT(NO_CONSTANTS, LOAD_F16, LOAD_F16_TAIL, STORE_F16, STORE_F16_TAIL)
