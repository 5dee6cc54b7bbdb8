package operators

// Constant is a named number. Its value is its position in the list.
type Constant struct{ Name, Doc string }

// Statuses are the results of functions of the C ABI. Their names are GANDER_OK and GANDER_ERROR_SHAPE in C,
// and StatusShape in Go.
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
	{"Internal", "a bug in gander: please report it"},
}

// Algorithms are named GANDER_ALGORITHM_AUTO in C, Auto in Go and "auto" in Python. gander_algorithms
// describes them.
var Algorithms = []Constant{
	{"Auto", "the one that was fastest in measurements"},
	{"Warp", ""}, {"Block", ""}, {"Register", ""}, {"Medium", ""}, {"Extreme", ""},
	{"Cluster", ""}, {"Arbitrary", ""}, {"SplitK", ""},
}

// IfServed can be added to an algorithm, so that Auto takes its place for rows that it cannot serve.
const IfServed = 0x100

// Reductions are named GANDER_REDUCTION_NONE in C, ReduceNone in Go and "none" in Python.
var Reductions = []Constant{
	{"None", "a loss for each row"},
	{"Mean", "the sum of the rows' losses over the sum of the counted rows' weights"},
	{"Sum", "the sum of the rows' losses"},
}
