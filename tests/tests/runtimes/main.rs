//! Tests on a whole machine: container runtimes that call netattach (`containers`), and the README's example as written
//! (`readme`).

mod containers;
mod readme;
