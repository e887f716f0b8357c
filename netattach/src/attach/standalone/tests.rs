//! Answers that need no machine.
