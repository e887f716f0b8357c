//! Embeds the BPF object that `cargo xtask build-ebpf` leaves in the target directory.
//!
//! `NETATTACH_BPF_OBJECT` names another object. Without one, an empty file is embedded, so that everything
//! builds without the BPF toolchain; `bpf::Dataplane::open` refuses it at run time.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-env-changed=NETATTACH_BPF_OBJECT");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let object = match env::var_os("NETATTACH_BPF_OBJECT") {
        Some(path) => PathBuf::from(path),
        None => in_target_directory(&out)?,
    };
    println!("cargo:rerun-if-changed={}", object.display());
    fs::copy(&object, out.join("netattach.bpf.o")).map_err(|error| {
        io::Error::new(error.kind(), format!("copy the BPF object {}: {error}", object.display()))
    })?;
    Ok(())
}

/// Where `xtask` puts the object: below the outermost target directory, for a build with `--target` has one
/// inside the other. An empty file takes its place until then: Cargo runs a build script again
/// and again while a file it watches does not exist.
fn in_target_directory(out: &Path) -> io::Result<PathBuf> {
    let target = out
        .ancestors()
        .filter(|directory| directory.join("CACHEDIR.TAG").exists())
        .last()
        .ok_or_else(|| io::Error::other(format!("{} is in no Cargo target directory", out.display())))?;
    let object = target.join("bpf/netattach.bpf.o");
    if !object.exists() {
        fs::create_dir_all(target.join("bpf"))?;
        fs::write(&object, [])?;
    }
    Ok(object)
}
