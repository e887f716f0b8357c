//! One file per kind of interface: configuration and planning. Pure.
