//! Which types of plugins netattach carries out itself: those that it implements and that `exec` does not list.

use super::super::resolve::Options;
use crate::link::{self, Driver};

/// Returns the driver of a type; `None` if netattach has none or the type is in `exec`.
pub(in crate::plan) fn native(kind: &str, options: &Options) -> Option<&'static dyn Driver> {
    link::driver(kind).filter(|_| !options.exec.iter().any(|name| name == kind))
}

/// Whether netattach implements the type itself, as an interface plugin or a chained one.
pub(in crate::plan) fn is_native(kind: &str, options: &Options) -> bool {
    native(kind, options).is_some() || is_chained(kind, options)
}

pub(super) fn is_chained(kind: &str, options: &Options) -> bool {
    link::chained(kind).is_some_and(|own| is_own(own, kind, options))
}

/// Whether the type is `own` and is not executed as a plugin.
pub(super) fn is_own(own: &str, kind: &str, options: &Options) -> bool {
    kind == own && !options.exec.iter().any(|name| name == kind)
}
