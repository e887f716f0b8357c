//! Device information files.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::attach::StepError;
use crate::error_chain::Chain;
use crate::npwg::device_info;
use crate::spec::{Device, DeviceId};
use crate::step::{DeviceInfoFiles, Output, Representor};
use crate::{bounded, budget};

/// Copies the device plugin's file to the path where the attachment's plugins look, and removes any file that is
/// there already. Without a device plugin's file the path stays empty, and a plugin may write it.
pub(super) fn prepare(files: &DeviceInfoFiles) -> Result<Output, StepError> {
    let failed = |path: &Path, source| StepError::DeviceInfo { path: path.to_owned(), source };
    let path = &files.attachment;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(|source| failed(directory, source))?;
    }
    remove(path)?;
    if let Some(described) = &files.device_plugin {
        match whole(described) {
            Ok(text) => {
                write_read_only(path, &text).map_err(|source| failed(path, source))?;
                crate::crash_point!("device-info", "copied");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(failed(described, source)),
        }
    }
    Ok(Output::Nothing)
}

/// Reads the attachment's file after its plugins have run. Information that does not have the specified form is not
/// published, because readers could not rely on it.
pub(super) fn read(path: &Path) -> Output {
    let text = match whole(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Output::Nothing,
        Err(error) => {
            tracing::warn!(path = %path.display(), error = %Chain(&error), "device information not read");
            return Output::Nothing;
        }
    };
    match device_info::parse(&text) {
        Ok(info) => Output::DeviceInfo { info },
        Err(error) => {
            tracing::warn!(path = %path.display(), error = %Chain(&error), "device information not published");
            Output::Nothing
        }
    }
}

/// Adds the representor of a VF to the attachment's information, and to its file.
///
/// # Errors
/// The file cannot be written.
pub(super) fn with_representor(
    path: &Path,
    found: Output,
    (device, representor): (&Device, &Representor),
) -> Result<Output, StepError> {
    let (DeviceId::Bus(name), Some(function)) = (&device.id, &device.function) else { return Ok(found) };
    let found = match found {
        Output::DeviceInfo { info } => Some(info),
        _ => None,
    };
    let of = (&**name, &*function.physical);
    let info = device_info::with_representor(found, of, &representor.device.name);
    remove(path)?;
    let written = write_read_only(path, info.to_string().as_bytes());
    written.map_err(|source| StepError::DeviceInfo { path: path.to_owned(), source })?;
    Ok(Output::DeviceInfo { info })
}

/// Removes the file; a missing file is success.
pub(super) fn remove(path: &Path) -> Result<(), StepError> {
    match fs::remove_file(path) {
        Err(source) if !bounded::is_absent(&source) => {
            Err(StepError::DeviceInfo { path: path.to_owned(), source })
        }
        _ => {
            crate::crash_point!("device-info", "removed");
            Ok(())
        }
    }
}

/// Does the same when an attachment ends. A directory was not written by a plugin for the attachment: it stays, and
/// does not make DEL fail.
pub(in crate::attach) fn forget(path: &Path) -> Result<(), StepError> {
    if path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        tracing::warn!(path = %path.display(), "a directory is where device information was; it stays");
        return Ok(());
    }
    remove(path)
}

fn whole(path: &Path) -> io::Result<Vec<u8>> {
    bounded::read(path, budget::DEVICE_INFO.most)
}

fn write_read_only(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(text)?;
    file.set_permissions(Permissions::from_mode(0o444))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::attach::AttachError;
    use crate::cni::{CniError, Command, code};

    #[test]
    fn a_directory_in_place_of_the_file_fails_an_add_and_no_del() {
        let directory = tempfile::tempdir().unwrap();
        let attachment = directory.path().join("attachment.json");
        fs::create_dir(&attachment).unwrap();
        let files = DeviceInfoFiles { device_plugin: None, attachment: attachment.clone() };
        let refused = prepare(&files).unwrap_err();
        assert!(matches!(&refused, StepError::DeviceInfo { path, .. } if *path == attachment), "{refused}");
        forget(&attachment).unwrap();
        assert!(attachment.is_dir());
        fs::remove_dir(&attachment).unwrap();
        forget(&attachment).unwrap();
        fs::write(&attachment, "{}").unwrap();
        forget(&attachment).unwrap();
        assert!(!attachment.exists());
    }

    #[test]
    fn information_of_all_bytes_that_there_may_be_is_passed_on_and_one_more_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let [described, attachment] =
            ["plugin.json", "attachment.json"].map(|name| directory.path().join(name));
        let files =
            DeviceInfoFiles { device_plugin: Some(described.clone()), attachment: attachment.clone() };
        let info = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:01:00.0"}});
        let most = budget::DEVICE_INFO.most;
        let text = |bytes: usize| bounded::padded(&info.to_string(), bytes);
        fs::write(&described, text(most)).unwrap();
        prepare(&files).unwrap();
        assert_eq!(fs::read_to_string(&attachment).unwrap(), text(most));
        assert_eq!(
            read(&attachment),
            Output::DeviceInfo { info: device_info::parse(text(most).as_bytes()).unwrap() }
        );
        fs::write(&described, text(most + 1)).unwrap();
        let refused = CniError::from(AttachError::Network {
            command: Command::Add,
            network: "lan".to_owned(),
            source: Box::new(prepare(&files).unwrap_err()),
        });
        let message = format!("device information {}: longer than {most} bytes", described.display());
        assert_eq!(refused.code, code::IO_FAILURE);
        assert!(refused.msg.ends_with(&message), "{}", refused.msg);
        assert_eq!(read(&described), Output::Nothing);
        assert!(!attachment.exists());
    }
}
