"""What the machine is (topology), what it does (probe), what it would do (simulator), what is wrong (doctor)."""
