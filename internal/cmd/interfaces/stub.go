package main
func fill(s string) (string, error) { return s, nil }
func deviceOptions() string { return "package kernels\n" }
func goOperators() string { return "package ops\n" }
func cExports() string { return "" }
func goExports() string { return "package main\n" }
func versionScript(string) string { return "" }
func torchOperators() string { return "" }
