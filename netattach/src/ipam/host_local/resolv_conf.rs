//! The `dns` part of a result, read from the file that `ipam.resolvConf` names.

use std::io;
use std::path::{Path, PathBuf};

use crate::cni::Dns;
use crate::{bounded, budget};

/// The file named by `ipam.resolvConf` cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("read ipam.resolvConf {path}")]
pub struct ReadResolvConfError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub source: io::Error,
}

/// Reads a file in the format of resolv.conf(5), as a process with the root directory `root` does.
///
/// # Errors
/// The file cannot be read as text.
pub fn read(path: &Path, root: Option<&Path>) -> Result<Dns, ReadResolvConfError> {
    let most = budget::RESOLV_CONF.most;
    let text = match root {
        Some(root) => bounded::read_text_below(root, path, most),
        None => bounded::read_text(path, most),
    };
    match text {
        Ok(text) => Ok(parse(&text)),
        Err(source) => Err(ReadResolvConfError { path: path.to_owned(), source }),
    }
}

/// Parses `nameserver`, `domain` (the last one wins), `search` and `options` lines; several `search` and `options`
/// lines are combined. Other lines are ignored.
fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with(['#', ';'])) {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("nameserver") => dns.nameservers.extend(words.next()),
            Some("domain") => dns.domain = words.next().or(dns.domain),
            Some("search") => dns.search.extend(words),
            Some("options") => dns.options.extend(words),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_add_up_and_the_last_domain_wins() {
        let text = "# by hand\n; too\nnameserver 192.0.2.1\n  nameserver\t2001:db8::1 ignored\ndomain a.example\n\
                    domain b.example\ndomain\nsearch one two\nsearch three\noptions ndots:2\noptions rotate\nsortlist x\nnameserver\n";
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            parse(text),
            Dns {
                nameservers: words("192.0.2.1 2001:db8::1"),
                domain: Some("b.example".to_owned()),
                search: words("one two three"),
                options: words("ndots:2 rotate"),
            }
        );
    }

    #[test]
    fn a_file_of_all_bytes_that_there_may_be_is_read_and_one_more_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("resolv.conf");
        let most = budget::RESOLV_CONF.most;
        let read_padded = |bytes: usize| {
            std::fs::write(&path, bounded::padded("nameserver 192.0.2.1\n", bytes)).unwrap();
            read(&path, None).map_err(|error| crate::error_chain::Chain(&error).to_string())
        };
        let dns = Dns { nameservers: vec!["192.0.2.1".to_owned()], ..Dns::default() };
        assert_eq!(read_padded(most), Ok(dns));
        let refused = format!("read ipam.resolvConf {}: longer than {most} bytes", path.display());
        assert_eq!(read_padded(most + 1), Err(refused));
    }

    #[test]
    fn with_the_nodes_root_directory_the_file_is_the_nodes() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/names.of.the.node"), "nameserver 192.0.2.9\n").unwrap();
        let path = Path::new("/etc/names.of.the.node");
        assert_eq!(read(path, Some(root.path())).unwrap().nameservers, ["192.0.2.9"]);
        assert!(read(path, None).is_err());
    }

    #[test]
    fn a_missing_file_is_named() {
        assert_eq!(
            read(Path::new("/nonexistent/resolv.conf"), None).unwrap_err().to_string(),
            "read ipam.resolvConf /nonexistent/resolv.conf"
        );
    }
}
