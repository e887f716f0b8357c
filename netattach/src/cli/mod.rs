//! The commands of `netattachctl`.
