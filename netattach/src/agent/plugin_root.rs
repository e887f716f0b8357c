//! The node's root directory, in which other plugins are started: there they find the programs, libraries and files that they
//! find on a node, of which the agent's image has none.
//!
//! The node's processes have other numbers than in the agent's container, and plugins ask for namespaces by the number of
//! their own process: so they get the agent's `/proc`, in the agent's own mounts alone.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::mount_bind_recursive;

use super::privileges::{self, Unprivileged};

const PROC: &str = "/proc";

/// Plugins cannot be started there.
#[derive(Debug, thiserror::Error)]
pub enum UnfitRoot {
    /// A capability is missing.
    #[error(transparent)]
    Privileges(#[from] Unprivileged),
    /// The directory, or the one for `proc` in it, cannot be used.
    #[error(
        "{} cannot be prepared for plugins: delegation.root is where the node's root directory is mounted, as deploy/components/executed-plugins does",
        path.display()
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Makes a root directory fit for plugins.
///
/// # Errors
/// The capability for it is missing, or what has to be there is not.
pub(super) fn prepare(root: &Path) -> Result<(), UnfitRoot> {
    privileges::check_another_root()?;
    let proc = root.join(PROC.trim_start_matches('/'));
    let failed = |source| UnfitRoot::Directory { path: proc.clone(), source };
    // By the device: an agent that starts again in the same mounts does not mount anew.
    let device = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.dev());
    if device(&proc).map_err(failed)? != device(Path::new(PROC)).map_err(failed)? {
        mount_bind_recursive(PROC, &proc).map_err(|errno| failed(errno.into()))?;
    }
    Ok(())
}
