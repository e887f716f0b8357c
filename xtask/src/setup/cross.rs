//! The C compiler and linker for another architecture, with a C library: installed when a build asks for it, not before.

use super::apt;
use crate::child;
use crate::progress::Progress;

/// Installs the package of a compiler unless the compiler is here; whether it was installed.
///
/// # Errors
/// It cannot be installed.
pub fn ensure_cross_compiler(compiler: &str, package: &str, progress: &Progress) -> anyhow::Result<bool> {
    if child::find(compiler).is_some() {
        return Ok(false);
    }
    // With the C library, which the compiler only recommends.
    let library = match package {
        "gcc-aarch64-linux-gnu" => "libc6-dev-arm64-cross",
        _ => "libc6-dev-amd64-cross",
    };
    apt::install(&[package, library], progress)?;
    Ok(true)
}
