package operators

//go:generate go run ../cmd/interfaces -root ../..
