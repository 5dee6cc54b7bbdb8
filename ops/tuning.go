package ops

import (
	"os"
	"strings"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
)

// tuningFile is for bench/tune.py, which times rows that the policy does not have. While GANDER_TUNE names
// a file, each call and Explain read it and plan by the row in it, or by the policy where it is empty.
var tuningFile = os.Getenv("GANDER_TUNE")

// tuningPlan makes the plan that the file asks for.
func tuningPlan(f *driver.Facts, r request) (*plan, error) {
	text, err := os.ReadFile(tuningFile)
	if err != nil {
		return nil, errorf(StatusOption, "GANDER_TUNE: %v", err)
	}
	line := strings.TrimSpace(string(text))
	if line == "" {
		return makePlan(f, r)
	}
	row, err := policy.ParseRow(line)
	if err != nil {
		return nil, errorf(StatusOption, "GANDER_TUNE: %s: %v", tuningFile, err)
	}
	p, served, err := attemptBy(f, r, []policy.Row{row})
	if err == nil && !served {
		err = errorf(StatusUnsupported,
			"GANDER_TUNE: %v of %d rows of %d elements cannot be served by %s; take another row",
			r.op, r.m, r.n, line)
	}
	return p, err
}
