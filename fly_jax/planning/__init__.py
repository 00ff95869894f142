"""The capacity planner: compiles the real steps for a topology and reads what the compiler says."""
