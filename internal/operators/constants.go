package operators

// Constant is a named number: its position in its list.
type Constant struct{ Name, Doc string }

// Statuses are what every function of the C ABI returns. They are GANDER_OK and GANDER_ERROR_SHAPE in C, StatusShape in
// Go.
var Statuses = []Constant{
	{"OK", "done"},
	{"Null", "a required tensor or pointer is missing"},
	{"Shape", "rank or shape"},
	{"DType", "element type"},
	{"Device", "device type, or operands on different devices"},
	{"Layout", "strides that cannot be served"},
	{"Alignment", "a pointer that is not aligned to its element"},
	{"Overlap", "an output overlaps another operand"},
	{"Option", "an option's value, or an option struct of unknown size"},
	{"Version", "a DLPack tensor of another major version"},
	{"Unsupported", "valid, but not served by this build, driver or device"},
	{"Memory", "an allocation failed"},
	{"CUDA", "the CUDA driver refused"},
	{"Fork", "called in a child process after fork()"},
	{"Internal", "a defect of gander: please report it"},
}

// Algorithms are GANDER_ALGORITHM_AUTO in C, Auto in Go and "auto" in Python. gander_algorithms says what each does.
var Algorithms = []Constant{
	{"Auto", "whatever was fastest where it was measured"},
	{"Warp", ""}, {"Block", ""}, {"Register", ""}, {"Medium", ""}, {"Extreme", ""}, {"Cluster", ""}, {"Arbitrary", ""},
	{"SplitK", ""},
}

// IfServed is added to an algorithm where another may take its place.
const IfServed = 0x100

// Reductions are GANDER_REDUCTION_NONE in C, ReduceNone in Go and "none" in Python.
var Reductions = []Constant{
	{"None", "a loss for each row"},
	{"Mean", "the sum of the rows' losses over the sum of the counted rows' weights"},
	{"Sum", "the sum of the rows' losses"},
}
