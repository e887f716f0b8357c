//! Build, test, demo and benchmark driver.

fn main() {}
