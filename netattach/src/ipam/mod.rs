//! Address management.
