package ops

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
)

// DType returns the element type of a DLPack dtype, and whether any op takes it.
func DType(d dlpack.DType) (kernels.DType, bool) {
	switch d {
	case dlpack.Float16:
		return kernels.Float16, true
	case dlpack.BFloat16:
		return kernels.BFloat16, true
	case dlpack.Float32:
		return kernels.Float32, true
	case dlpack.Float64:
		return kernels.Float64, true
	case dlpack.Int32:
		return kernels.Int32, true
	case dlpack.Int64:
		return kernels.Int64, true
	case dlpack.Bool:
		return kernels.Bool, true
	case dlpack.Uint8:
		return kernels.Uint8, true
	}
	return 0, false
}

// types is a set of element types.
type types uint8

func only(t kernels.DType) types { return 1 << t }

// typeRule is a rule for an operand's element type: the types beside a first operand of float64 (wide), and
// beside one of another type.
type typeRule struct{ narrow, wide types }

func (r typeRule) with(first kernels.DType) types {
	if first == kernels.Float64 {
		return r.wide
	}
	return r.narrow
}

func (s types) String() string {
	var names []string
	for t := kernels.Float16; t <= kernels.Uint8; t++ {
		if s&only(t) != 0 {
			names = append(names, t.String())
		}
	}
	if last := len(names) - 1; last > 0 {
		return strings.Join(names[:last], ", ") + " or " + names[last]
	}
	return names[0]
}

// check validates the operands of one call. It keeps the first error; later checks of the call may then see
// zero values. It allocates memory only if there is an error.
type check struct {
	op     string
	err    *Error
	first  string        // the first operand, which sets the device for all
	device dlpack.Device // of all operands
	spans  [16]span      // the memory of the operands so far
	count  int           // of spans
	dims   []int64       // the shape of the first operand
	unmet  conditions    // those that do not hold for this call
}

// span is the memory of one operand: rows of cols elements.
type span struct {
	name   string
	dtype  kernels.DType
	data   int64
	rows   int64
	cols   int64
	stride int64
	steps  [3]int64 // of heads: their strides, 0 where there is one of a kind
	shared bool     // of heads: elements share memory
}

func (k *check) fail(s Status, format string, args ...any) {
	if k.err == nil {
		k.err = &Error{s, k.op + ": " + fmt.Sprintf(format, args...)}
	}
}

// finite checks an option that is a number. Rows of any type but float64 are computed in float32, which must
// hold it.
func (k *check) finite(name string, v float64) {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		k.fail(StatusOption, "%s is %v, expected a finite number", name, v)
	case math.IsInf(float64(float32(v)), 0) && k.spans[0].dtype != kernels.Float64:
		k.fail(StatusOption, "%s is %v, expected a number that float32 holds, at most %g; only float64 tensors "+
			"take a larger one", name, v, float32(math.MaxFloat32))
	}
}

// operand checks what all operands have in common and returns the element type. Nothing of a tensor may be
// used before: its shape may not even be there.
func (k *check) operand(name string, t *dlpack.Tensor, allowed types) (d kernels.DType, ok bool) {
	if t == nil {
		k.fail(StatusNull, "%s is NULL, expected a tensor", name)
		return 0, false
	}
	if err := t.Validate(); err != nil {
		status := StatusShape
		switch {
		case errors.Is(err, dlpack.ErrNull):
			status = StatusNull
		case errors.Is(err, dlpack.ErrDType):
			status = StatusDType
		case errors.Is(err, dlpack.ErrLayout):
			status = StatusLayout
		}
		k.fail(status, "%s is not a valid DLPack tensor, it has %v", name, err)
		return 0, false
	}
	k.sameDevice(name, t.Device)
	d, ok = DType(t.DType)
	if !ok {
		k.fail(StatusDType, "%s has dtype %v, expected %v; convert it", name, t.DType, allowed)
		return 0, false
	}
	k.dtype(name, d, allowed)
	if t.Len() > 0 && int64(uintptr(t.Pointer()))%d.Size() != 0 {
		k.fail(StatusAlignment, "%s begins %d bytes after a multiple of %d, expected an address aligned to "+
			"the size of a %v; copy it", name, int64(uintptr(t.Pointer()))%d.Size(), d.Size(), d)
	}
	return d, k.err == nil
}

// dtype checks an element type. It needs the device of the operands.
func (k *check) dtype(name string, d kernels.DType, allowed types) {
	switch {
	case allowed&only(d) == 0:
		k.fail(StatusDType, "%s has dtype %v, expected %v; convert it", name, d, allowed)
	case d == kernels.Float64 && !k.device.Host():
		k.fail(StatusUnsupported, "%s has dtype float64 on %v, expected %v there; convert it, or move the "+
			"operands to host memory, where float64 is served", name, k.device, typeCompanion.narrow)
	}
}

const servedDevices = "cpu (1), cuda (2), cuda_host (3) or cuda_managed (13)"

func served(d dlpack.Device) bool {
	return d.Host() || d.Type == dlpack.CUDA || d.Type == dlpack.CUDAManaged
}

// sameDevice checks that an operand is on the device of the others. Every CUDA device can access managed
// memory.
func (k *check) sameDevice(name string, d dlpack.Device) {
	if !served(d) {
		k.fail(StatusDevice, "%s is on %v, expected %s; copy it there", name, d, servedDevices)
	}
	switch {
	case k.first == "":
		k.first, k.device = name, d
	case d.Host() != k.device.Host(),
		d.Type == dlpack.CUDA && k.device.Type == dlpack.CUDA && d.ID != k.device.ID:
		k.fail(StatusDevice, "%s is on %v, expected %v as %s; move one of them", name, d, k.device, k.first)
	case d.Type == dlpack.CUDA:
		k.device = d
	}
}

// rows checks the first operand, of rows (M, N).
func (k *check) rows(name string, t *dlpack.Tensor, allowed types) kernels.Matrix {
	d, ok := k.operand(name, t, allowed)
	if !ok {
		return kernels.Matrix{}
	}
	last := t.Rank() - 1
	switch {
	case last < 0:
		k.fail(StatusShape, "%s has rank 0, expected rows (M, N) of rank 1 or more; reshape it to (1, 1)",
			name)
		return kernels.Matrix{}
	case t.Dim(last) == 0:
		k.fail(StatusShape, "%s has shape %s, expected a last dimension of 1 or more; skip the call",
			name, shape(t))
		return kernels.Matrix{}
	}
	if k.dims = t.Dims(); last < 1 {
		k.unmet |= headed
	}
	return k.matrix(name, t, d)
}

// rowsLike checks another operand of rows, which has the shape of the first.
func (k *check) rowsLike(name string, t *dlpack.Tensor, allowed types) kernels.Matrix {
	d, ok := k.operand(name, t, allowed)
	if !ok || !slices.Equal(t.Dims(), k.dims) && k.form(name, t, shapeRows.forms) == nil {
		return kernels.Matrix{}
	}
	return k.matrix(name, t, d)
}

// rowsOf checks rows of a shape that follows from that of the first operand.
func (k *check) rowsOf(name string, t *dlpack.Tensor, allowed types, r *shapeRule) kernels.Matrix {
	d, ok := k.operand(name, t, allowed)
	if !ok || k.form(name, t, r.forms) == nil || t.Dim(t.Rank()-1) == 0 { // the operator refuses that
		return kernels.Matrix{}
	}
	return k.matrix(name, t, d)
}

// rowsFitting checks another operand of rows, which has exactly the shape of an operand.
func (k *check) rowsFitting(
	name string, t *dlpack.Tensor, allowed types, other string, o *dlpack.Tensor,
) kernels.Matrix {
	d, ok := k.operand(name, t, allowed)
	if !ok || !k.like(name, t, &shapeRows, other, o) {
		return kernels.Matrix{}
	}
	return k.matrix(name, t, d)
}

// adjacent checks that elements are adjacent in the last dimension.
func (k *check) adjacent(name string, t *dlpack.Tensor) bool {
	last := t.Rank() - 1
	if t.Len() == 0 || t.Dim(last) == 1 || t.Stride(last) == 1 {
		return true
	}
	k.fail(StatusLayout, "%s has stride %d in its last dimension, expected adjacent elements (stride 1); make "+
		"it contiguous", name, t.Stride(last))
	return false
}

// matrix checks the strides of rows.
func (k *check) matrix(name string, t *dlpack.Tensor, d kernels.DType) kernels.Matrix {
	last, ok := t.Rank()-1, true
	if !k.adjacent(name, t) {
		return kernels.Matrix{}
	}
	m := kernels.Matrix{
		Data: t.Pointer(), DType: d, Rows: t.Len() / t.Dim(last), Cols: t.Dim(last), Stride: t.Dim(last),
	}
	switch {
	case m.Rows == 0:
		m.Data = nil
	case m.Rows > 1:
		if m.Stride, ok = collapse(t, last); !ok {
			k.fail(StatusLayout, "%s has shape %s and strides %s, expected leading dimensions that collapse "+
				"into rows one fixed stride apart; make it contiguous", name, shape(t), strides(t))
		}
	}
	k.add(span{name: name, dtype: d, data: int64(uintptr(m.Data)), rows: m.Rows, cols: m.Cols, stride: m.Stride})
	return m
}

// heads checks the first operand, of the heads of tokens.
func (k *check) heads(name string, t *dlpack.Tensor, allowed types) kernels.Heads {
	d, ok := k.operand(name, t, allowed)
	if !ok {
		return kernels.Heads{}
	}
	rank := t.Rank()
	switch {
	case rank < 3:
		k.fail(StatusShape, "%s has shape %s, expected (..., tokens, heads, columns) of rank 3 or more; reshape it",
			name, shape(t))
		return kernels.Heads{}
	case t.Dim(rank-1) == 0:
		k.fail(StatusShape, "%s has shape %s, expected a last dimension of 1 or more; skip the call",
			name, shape(t))
		return kernels.Heads{}
	}
	k.dims = t.Dims()
	return k.inHeads(name, t, d)
}

// headsOf checks heads of a shape that follows from that of the first operand.
func (k *check) headsOf(name string, t *dlpack.Tensor, allowed types, r *shapeRule) kernels.Heads {
	d, ok := k.operand(name, t, allowed)
	if !ok || k.form(name, t, r.forms) == nil {
		return kernels.Heads{}
	}
	return k.inHeads(name, t, d)
}

// headsFitting checks heads that have exactly the shape of an operand. Without that, the operand is refused
// elsewhere.
func (k *check) headsFitting(
	name string, t *dlpack.Tensor, allowed types, other string, o *dlpack.Tensor,
) kernels.Heads {
	d, ok := k.operand(name, t, allowed)
	if !ok || !k.like(name, t, &shapeOtherHeads, other, o) {
		return kernels.Heads{}
	}
	return k.inHeads(name, t, d)
}

// inHeads checks the strides of heads.
func (k *check) inHeads(name string, t *dlpack.Tensor, d kernels.DType) kernels.Heads {
	token, head, last := t.Rank()-3, t.Rank()-2, t.Rank()-1
	if !k.adjacent(name, t) {
		return kernels.Heads{}
	}
	h := kernels.Heads{
		Data: t.Pointer(), DType: d, Sequences: 1, Tokens: t.Dim(token), Heads: t.Dim(head), Cols: t.Dim(last),
	}
	for i := range token {
		h.Sequences *= t.Dim(i)
	}
	if t.Len() == 0 {
		h.Data = nil
		k.add(span{name: name, dtype: d})
		return h
	}
	var ok bool
	if h.SequenceStride, ok = collapse(t, token); !ok {
		k.fail(StatusLayout, "%s has shape %s and strides %s, expected dimensions before the tokens that collapse "+
			"into sequences one fixed stride apart; make it contiguous", name, shape(t), strides(t))
		return kernels.Heads{}
	}
	h.TokenStride, h.HeadStride = t.Stride(token), t.Stride(head)
	k.add(spanOf(name, &h))
	return h
}

// spanOf is the memory of heads. Where heads or tokens nest in each other, it consists of rows, so that
// slices of a buffer's columns are seen not to overlap.
func spanOf(name string, h *kernels.Heads) span {
	extents := [3]int64{h.Sequences, h.Tokens, h.Heads}
	steps := [3]int64{h.SequenceStride, h.TokenStride, h.HeadStride}
	for i, extent := range extents {
		if extent == 1 {
			steps[i] = 0
		}
	}
	s := span{name: name, dtype: h.DType, rows: 1, cols: h.Cols, steps: steps}
	low := int64(0)
	for i, extent := range extents {
		low += min(steps[i]*(extent-1), 0)
		s.cols += abs(steps[i]) * (extent - 1)
	}
	s.data = int64(uintptr(h.Data)) + low*h.DType.Size()
	// The outer two of the three, if they collapse, and the inner one fits in a row.
	for _, order := range [][3]int{{0, 1, 2}, {0, 2, 1}} {
		outer, next, inner := order[0], order[1], order[2]
		reach := steps[inner]*(extents[inner]-1) + h.Cols
		rows, stride := extents[outer]*extents[next], steps[next]
		if extents[next] == 1 {
			stride = steps[outer]
		}
		collapses := extents[outer] == 1 || extents[next] == 1 || steps[outer] == steps[next]*extents[next]
		if collapses && steps[inner] >= 0 && stride >= reach && rows > 1 {
			s.rows, s.cols, s.stride = rows, reach, stride
			break
		}
	}
	// Elements share memory if a step does not lead past all that lies within smaller steps.
	for i, step := range steps {
		reach := h.Cols - 1
		for j, other := range steps {
			if j != i && abs(other) <= abs(step) {
				reach += abs(other) * (extents[j] - 1)
			}
		}
		s.shared = s.shared || extents[i] > 1 && abs(step) <= reach
	}
	return s
}

// table checks a table of numbers for each position, of each sequence or of all.
func (k *check) table(name string, t *dlpack.Tensor, allowed types) kernels.Table {
	d, ok := k.operand(name, t, allowed)
	if !ok {
		return kernels.Table{}
	}
	row, last := t.Rank()-2, t.Rank()-1
	sequences, matches := int64(1), row == 0 || row == len(k.dims)-3
	for i := range max(row, 0) {
		sequences *= t.Dim(i)
	}
	if row > 0 && matches && sequences != 1 {
		matches = slices.Equal(t.Dims()[:row], k.dims[:row])
	}
	if !matches {
		lead := list(len(k.dims)-3, func(i int) int64 { return k.dims[i] })
		k.fail(StatusShape, "%s has shape %s, expected (positions, width), or before that %s, the sequences of "+
			"%s, or as many 1s", name, shape(t), lead, k.first)
		return kernels.Table{}
	}
	if t.Dim(last) == 0 {
		k.fail(StatusShape, "%s has shape %s, expected a last dimension of 1 or more", name, shape(t))
		return kernels.Table{}
	}
	if !k.adjacent(name, t) {
		return kernels.Table{}
	}
	table := kernels.Table{
		Data: t.Pointer(), DType: d, Rows: t.Dim(row), Cols: t.Dim(last), Stride: t.Stride(row),
	}
	if sequences > 1 {
		if table.SequenceStride, ok = collapse(t, row); !ok {
			k.fail(StatusLayout, "%s has shape %s and strides %s, expected dimensions before the positions that "+
				"collapse into sequences one fixed stride apart; make it contiguous", name, shape(t), strides(t))
		}
	}
	if t.Len() == 0 {
		table.Data = nil
		k.add(span{name: name, dtype: d})
		return table
	}
	k.add(spanOf(name, &kernels.Heads{
		Data: table.Data, DType: d, Sequences: sequences, Tokens: table.Rows, Heads: 1, Cols: table.Cols,
		SequenceStride: table.SequenceStride, TokenStride: table.Stride,
	}))
	return table
}

// tableFitting checks a table that has exactly the shape of an operand.
func (k *check) tableFitting(
	name string, t *dlpack.Tensor, allowed types, other string, o *dlpack.Tensor,
) kernels.Table {
	if d, ok := k.operand(name, t, allowed); !ok || !k.like(name, t, &shapePositions, other, o) {
		return kernels.Table{DType: d}
	}
	return k.table(name, t, allowed)
}

// broadcast checks an operand that broadcasts to the shape of the first.
func (k *check) broadcast(name string, t *dlpack.Tensor, allowed types) kernels.Mask {
	d, ok := k.operand(name, t, allowed)
	if !ok {
		return kernels.Mask{}
	}
	x, rank, missing := k.dims, len(k.dims), len(k.dims)-t.Rank()
	for i := range t.Rank() {
		if missing < 0 || t.Dim(i) != 1 && t.Dim(i) != x[i+missing] {
			k.fail(StatusShape, "%s has shape %s, expected one that broadcasts to %s, the shape of %s",
				name, shape(t), list(rank, func(i int) int64 { return x[i] }), k.first)
			return kernels.Mask{}
		}
	}
	m := kernels.Mask{Data: t.Pointer(), DType: d, Extents: [2]int64{1, 1}}
	stride := func(i int) int64 { // of dimension i of x
		if i < missing || t.Dim(i-missing) == 1 {
			return 0
		}
		return t.Stride(i - missing)
	}
	if m.Column = stride(rank - 1); m.Column != 0 && m.Column != 1 {
		k.fail(StatusLayout, "%s has stride %d in its last dimension, expected 1, or 0 for one element for "+
			"all columns; make it contiguous", name, m.Column)
	}
	low, high := int64(0), m.Column*(x[rank-1]-1) // offsets of the first and the last element in memory
	count, last := 0, int64(1)                    // of strides, and the last one's extent
	for i := rank - 2; i >= 0; i-- {
		extent, step := x[i], stride(i)
		if extent == 1 {
			continue
		}
		low, high = low+min(step*(extent-1), 0), high+max(step*(extent-1), 0)
		switch {
		case count > 0 && step == m.Strides[count-1]*last:
			last *= extent
		case count == len(m.Strides):
			k.fail(StatusLayout, "%s has shape %s and strides %s, expected leading dimensions that collapse "+
				"into %d or fewer; expand it to the shape of %s and make it contiguous", name, shape(t),
				strides(t), len(m.Strides), k.first)
			return kernels.Mask{}
		default:
			m.Strides[count], last = step, extent
			count++
		}
		if count <= len(m.Extents) {
			m.Extents[count-1] = last
		}
	}
	if t.Len() > 0 {
		k.add(span{name: name, dtype: d,
			data: int64(uintptr(m.Data)) + low*d.Size(), rows: 1, cols: high - low + 1})
	} else {
		m.Data = nil
	}
	return m
}

// vector checks an operand of numbers with a fixed stride.
func (k *check) vector(name string, t *dlpack.Tensor, allowed types, r *shapeRule) kernels.Vector {
	d, ok := k.operand(name, t, allowed)
	if !ok || k.form(name, t, r.forms) == nil {
		return kernels.Vector{}
	}
	return k.elements(name, t, d, r)
}

// fitting is vector for an operand that has the shape of another.
func (k *check) fitting(
	name string, t *dlpack.Tensor, allowed types, r *shapeRule, other string, o *dlpack.Tensor,
) kernels.Vector {
	d, ok := k.operand(name, t, allowed)
	if !ok || !k.like(name, t, r, other, o) {
		return kernels.Vector{}
	}
	return k.elements(name, t, d, r)
}

// elements checks the strides of numbers. A number that stands for all rows has stride 0.
func (k *check) elements(name string, t *dlpack.Tensor, d kernels.DType, r *shapeRule) kernels.Vector {
	v, ok := kernels.Vector{Data: t.Pointer(), DType: d, Len: t.Len(), Stride: 1}, true
	switch {
	case v.Len == 0:
		v.Data = nil
	case v.Len > 1:
		if v.Stride, ok = collapse(t, t.Rank()); !ok {
			k.fail(StatusLayout, "%s has shape %s and strides %s, expected elements one fixed stride apart; "+
				"make it contiguous", name, shape(t), strides(t))
		}
	case r.layout == regular && len(r.forms) > 1:
		v.Stride = 0
	}
	if r.layout != regular && v.Stride != 1 {
		k.fail(StatusLayout, "%s has stride %d, expected adjacent elements (stride 1); make it contiguous",
			name, v.Stride)
	}
	k.add(span{name: name, dtype: d, data: int64(uintptr(v.Data)), rows: v.Len, cols: 1, stride: v.Stride})
	return v
}

// collapse returns the stride between consecutive elements of the first `rank` dimensions of t, in row-major
// order. ok is false if there is no such fixed stride.
func collapse(t *dlpack.Tensor, rank int) (stride int64, ok bool) {
	n := int64(1)
	for i := rank - 1; i >= 0; i-- {
		d := t.Dim(i)
		switch {
		case d == 1:
			continue
		case n == 1:
			stride = t.Stride(i)
		case t.Stride(i) != stride*n:
			return 0, false
		}
		n *= d
	}
	return stride, true
}

func (k *check) add(s span) {
	k.spans[k.count] = s
	k.count++
}

// output checks that the operand added last can be written. Its rows must not overlap one another, nor any
// operand added before. The operands named in same are exceptions: it may be exactly the same memory.
// Refusals then name the input that it is.
func (k *check) output(same ...string) {
	if k.err != nil {
		return
	}
	w, inPlace := k.spans[k.count-1], false
	for i := range k.spans[:k.count-1] {
		if s := &k.spans[i]; w.same(s) && slices.Contains(same, s.name) {
			w.name, inPlace = s.name, true
			break
		}
	}
	if w.rows > 1 && w.cols > max(w.stride, -w.stride) {
		k.fail(StatusLayout, "%s has rows of %d elements %d apart, expected an output whose rows do not "+
			"overlap; make it contiguous", w.name, w.cols, w.stride)
	}
	if w.shared {
		k.fail(StatusLayout, "%s has strides %v of sequences, tokens and heads, expected an output whose elements "+
			"do not share memory; make it contiguous", w.name, w.steps)
	}
	for i := range k.spans[:k.count-1] {
		s := &k.spans[i]
		if !w.overlaps(s) {
			continue
		}
		switch allowed := slices.Contains(same, s.name); {
		case allowed && w.same(s):
		case allowed && !inPlace:
			k.fail(StatusOverlap, "%s overlaps %s, expected exactly the same rows and dtype, or separate "+
				"memory; allocate %s separately", w.name, s.name, w.name)
		default:
			k.fail(StatusOverlap, "%s overlaps %s, expected separate memory; allocate %s separately",
				w.name, s.name, w.name)
		}
	}
}

// bounds returns the addresses of the first byte and of the byte after the last.
func (s *span) bounds() (low, high int64) {
	last := (s.rows - 1) * s.stride * s.dtype.Size() // the last row's offset, negative where the stride is
	return s.data + min(last, 0), s.data + max(last, 0) + s.cols*s.dtype.Size()
}

func (s *span) overlaps(o *span) bool {
	if s.rows == 0 || s.cols == 0 || o.rows == 0 || o.cols == 0 {
		return false
	}
	low, high := s.bounds()
	low2, high2 := o.bounds()
	if high <= low2 || high2 <= low {
		return false
	}
	// Two slices of a buffer's columns have overlapping address ranges but may share no element. Their rows
	// have the same pitch, so it is enough to compare the bytes that they use within one pitch.
	pitch := abs(s.stride * s.dtype.Size())
	if s.rows < 2 || o.rows < 2 || pitch == 0 || pitch != abs(o.stride*o.dtype.Size()) {
		return true
	}
	shift := ((o.data-s.data)%pitch + pitch) % pitch
	return shift < s.cols*s.dtype.Size() || shift+o.cols*o.dtype.Size() > pitch
}

// same reports whether two operands consist of the same elements in memory, in the same order.
func (s *span) same(o *span) bool {
	return s.data == o.data && s.dtype == o.dtype && s.rows == o.rows && s.cols == o.cols &&
		(s.rows < 2 || s.stride == o.stride) && s.steps == o.steps
}

func abs(v int64) int64 { return max(v, -v) }

func shape(t *dlpack.Tensor) string { return list(t.Rank(), t.Dim) }

func strides(t *dlpack.Tensor) string { return list(t.Rank(), t.Stride) }

// list formats n numbers. It does not use fmt, which would make the tensor escape to the heap.
func list(n int, number func(int) int64) string {
	text := []byte{'('}
	for i := range n {
		if i > 0 {
			text = append(text, ", "...)
		}
		text = strconv.AppendInt(text, number(i), 10)
	}
	if n == 1 {
		text = append(text, ',')
	}
	return string(append(text, ')'))
}
