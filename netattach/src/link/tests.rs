//! Planning of each kind.
