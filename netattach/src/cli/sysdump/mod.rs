//! `netattachctl sysdump`: writes one archive for diagnosing a node, without secrets.
//!
//! It works with and without an agent: the archive lists what could not be read. Every part and the whole
//! ([`MOST_TOTAL`]) are bounded. `redact` removes secrets from everything that others write; [`tar`] writes
//! the format.

mod redact;
mod tar;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;

use super::output::Format;
use super::{Answer, CliError, ask, doctor, time, visible};
use crate::bounded;
use crate::error_chain::Chain;
use crate::rpc::message::{FlowsCall, Request, Response};
use redact::{redact_text, redact_yaml};

/// Most bytes of one file in the archive, before it is compressed.
const MOST_FILE: usize = 4 << 20;

/// Most bytes of all files together, before they are compressed.
const MOST_TOTAL: usize = 64 << 20;

/// Most files of one directory.
const MOST_FILES: usize = 500;

/// Where the archive goes, and what is read.
#[derive(Debug, Args)]
pub(super) struct Sysdump {
    /// The archive; - for standard output [default: netattach-sysdump-HOST-TIME.tar.gz in this directory]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Settings of the agent [default: those of the netattachd that runs, else the built-in ones]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What was written.
#[derive(Debug, Serialize)]
struct Written {
    /// The archive.
    file: PathBuf,
    /// Files in it.
    files: usize,
    /// Their bytes before compression.
    bytes: usize,
    /// The parts that are missing, with the reasons.
    left_out: Vec<String>,
}

/// An archive that is being written.
struct Dump<W: Write> {
    archive: tar::Writer<GzEncoder<W>>,
    files: usize,
    bytes: usize,
    left_out: Vec<String>,
    now_s: u64,
}

impl Sysdump {
    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        if self.is_stdout() {
            let written = self.write(socket, PathBuf::from("-"), io::stdout().lock())?;
            // Printed to standard error, as standard output is the archive.
            for left_out in &written.left_out {
                let _ = writeln!(io::stderr(), "netattachctl: left out: {}", visible::inline(left_out));
            }
            return Ok((String::new(), Ok(())));
        }
        let (path, file) = self.create()?;
        let written = self.write(socket, path.clone(), file).inspect_err(|_| {
            // A partial archive is of no use.
            let _ = fs::remove_file(&path);
        })?;
        Ok((format.show(&written, |_| render(&written))?, Ok(())))
    }

    /// Returns the local file for the archive of another machine; `None` if it goes to standard output.
    pub(super) fn local(&self) -> Result<Option<(PathBuf, fs::File)>, CliError> {
        if self.is_stdout() { Ok(None) } else { self.create().map(Some) }
    }

    fn create(&self) -> Result<(PathBuf, fs::File), CliError> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.file.clone().unwrap_or_else(default_name);
        // Only for the owner: the archive contains addresses and names of pods.
        let created = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        created.map(|file| (path.clone(), file)).map_err(|source| CliError::Archive { path, source })
    }

    /// Whether the archive goes to standard output.
    fn is_stdout(&self) -> bool {
        self.file.as_deref() == Some(Path::new("-"))
    }

    fn write(&self, socket: &Path, file: PathBuf, out: impl Write) -> Result<Written, CliError> {
        let failed = |source| CliError::Archive { path: file.clone(), source };
        let mut dump = Dump {
            archive: tar::Writer::new(GzEncoder::new(out, Compression::default())),
            files: 0,
            bytes: 0,
            left_out: Vec::new(),
            now_s: time::now_ms() / 1000,
        };
        self.fill(&mut dump, socket).map_err(failed)?;
        let (files, bytes, left_out) = (dump.files, dump.bytes, dump.left_out.clone());
        let text = left_out.join("\n") + "\n";
        dump.add("left-out.txt", text.as_bytes()).map_err(failed)?;
        let mut inner = dump.archive.finish().and_then(GzEncoder::finish).map_err(failed)?;
        inner.flush().map_err(failed)?;
        Ok(Written { file: file.clone(), files: files + 1, bytes, left_out })
    }

    fn fill(&self, dump: &mut Dump<impl Write>, socket: &Path) -> io::Result<()> {
        let about =
            format!("netattachctl {}\n{}\n", env!("CARGO_PKG_VERSION"), time::rfc3339(dump.now_s * 1000));
        dump.add("about.txt", about.as_bytes())?;
        let checks = doctor::checks(socket, self.config.as_deref());
        dump.value("doctor.json", &checks)?;
        for (name, request) in questions() {
            match ask(socket, &request) {
                Ok(answer) => dump.value(&format!("agent/{name}.json"), &inner(&answer))?,
                Err(error) => dump.leave_out(&format!("agent/{name}.json"), &Chain(&error).to_string()),
            }
        }
        let settings = doctor::settings(self.config.as_deref());
        dump.value("settings.json", &settings)?;
        let directories = [
            ("cni-conf", settings.cni_conf.dir.clone()),
            ("cni-conf", PathBuf::from("/etc/cni/net.d")),
            ("networks", settings.cni_conf_dir.clone()),
            ("journal", settings.state_dir.join("journal")),
            ("pending", settings.state_dir.join("pending")),
            ("network-status", settings.run_dir.join("network-status")),
        ];
        let mut seen = Vec::new();
        for (name, directory) in directories {
            if !directory.as_os_str().is_empty() && !seen.contains(&directory) {
                dump.directory(name, &directory, 2)?;
                seen.push(directory);
            }
        }
        if !settings.source.as_os_str().is_empty() {
            dump.directory("manifests", &settings.source, 4)?;
        }
        dump.names("pins.txt", &settings.bpffs, 3)?;
        dump.names("namespaces.txt", Path::new("/run/netns"), 1)?;
        for (name, path) in MACHINE {
            dump.file(&format!("machine/{name}"), Path::new(path))?;
        }
        Ok(())
    }
}

/// Returns the requests to the agent.
fn questions() -> [(&'static str, Request); 7] {
    [
        ("status", Request::Status),
        ("attachments", Request::Attachments),
        ("stats", Request::Stats),
        ("policy", Request::Policy),
        ("policy-dump", Request::PolicyDump(None)),
        ("pools", Request::Pools),
        ("flows", Request::Flows(FlowsCall::default())),
    ]
}

/// Files of the kernel about links, routes and loaded programs; none contains a secret.
const MACHINE: [(&str, &str); 11] = [
    ("version", "/proc/version"),
    ("cpuinfo", "/proc/cpuinfo"),
    ("meminfo", "/proc/meminfo"),
    ("modules", "/proc/modules"),
    ("mounts", "/proc/self/mounts"),
    ("net-dev", "/proc/net/dev"),
    ("net-route", "/proc/net/route"),
    ("net-ipv6-route", "/proc/net/ipv6_route"),
    ("net-arp", "/proc/net/arp"),
    ("net-if-inet6", "/proc/net/if_inet6"),
    ("os-release", "/etc/os-release"),
];

/// An answer without its tag.
fn inner(answer: &Response) -> serde_json::Value {
    match serde_json::to_value(answer) {
        Ok(serde_json::Value::Object(tagged)) if tagged.len() == 1 => {
            tagged.into_iter().next().map(|(_, value)| value).unwrap_or_default()
        }
        Ok(value) => value,
        Err(error) => error.to_string().into(),
    }
}

impl<W: Write> Dump<W> {
    fn leave_out(&mut self, name: &str, why: &str) {
        self.left_out.push(format!("{name}: {why}"));
    }

    /// Adds a file, truncated at its bound; does nothing once the archive is full.
    fn add(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        if self.bytes + content.len().min(MOST_FILE) > MOST_TOTAL {
            self.leave_out(name, "the archive is full");
            return Ok(());
        }
        let content = match content.get(..MOST_FILE) {
            Some(cut) if content.len() > MOST_FILE => {
                self.leave_out(name, &format!("only its first {MOST_FILE} bytes are there"));
                cut
            }
            _ => content,
        };
        self.bytes += content.len();
        self.files += 1;
        self.archive.file(name, content, self.now_s)
    }

    fn value(&mut self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let mut value = serde_json::to_value(value).unwrap_or_default();
        redact::redact(&mut value);
        let text = serde_json::to_string_pretty(&value).unwrap_or_default() + "\n";
        self.add(name, text.as_bytes())
    }

    /// Adds a file of the machine, without secrets.
    fn file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        match bounded::read(path, MOST_FILE) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let is_data = path.extension().is_some_and(|end| {
                    ["json", "conf", "conflist", "yaml", "yml"].iter().any(|data| end == *data)
                });
                let text = if is_data { redact_yaml(&text) } else { redact_text(&text) };
                self.add(name, text.as_bytes())
            }
            Err(error) => {
                self.leave_out(name, &format!("{}: {error}", path.display()));
                Ok(())
            }
        }
    }

    /// Adds the files of a directory and its subdirectories. Symbolic links are not followed.
    fn directory(&mut self, name: &str, directory: &Path, depth: usize) -> io::Result<()> {
        for entry in self.entries(name, directory) {
            let below = format!("{name}/{}", entry.file_name().to_string_lossy());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && depth > 1 => self.directory(&below, &entry.path(), depth - 1)?,
                Ok(kind) if kind.is_file() => self.file(&below, &entry.path())?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds the names below a directory.
    fn names(&mut self, name: &str, directory: &Path, depth: usize) -> io::Result<()> {
        let mut found = Vec::new();
        let mut waiting = vec![(directory.to_owned(), depth)];
        while let Some((directory, depth)) = waiting.pop() {
            for entry in self.entries(name, &directory) {
                found.push(entry.path().display().to_string());
                if depth > 1 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    waiting.push((entry.path(), depth - 1));
                }
            }
        }
        found.sort();
        self.add(name, (found.join("\n") + "\n").as_bytes())
    }

    /// Returns the entries of a directory by name, up to a bound.
    fn entries(&mut self, name: &str, directory: &Path) -> Vec<fs::DirEntry> {
        let mut entries: Vec<_> = match fs::read_dir(directory) {
            Ok(entries) => entries.flatten().collect(),
            Err(error) => {
                self.leave_out(name, &format!("{}: {error}", directory.display()));
                return Vec::new();
            }
        };
        entries.sort_by_key(fs::DirEntry::file_name);
        if entries.len() > MOST_FILES {
            self.leave_out(name, &format!("{} more in {}", entries.len() - MOST_FILES, directory.display()));
            entries.truncate(MOST_FILES);
        }
        entries
    }
}

fn default_name() -> PathBuf {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let time = time::rfc3339(time::now_ms()).replace([':', '.'], "-");
    format!("netattach-sysdump-{host}-{time}.tar.gz").into()
}

fn render(written: &Written) -> String {
    let Written { file, files, bytes, left_out } = written;
    let mut text =
        format!("{}: {files} files, {} KiB before compression\n", file.display(), bytes.div_ceil(1024));
    for left_out in left_out {
        text.push_str(&visible::line(&format!("left out: {left_out}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use clap::Parser;

    use super::super::tests::is_pinned;
    use super::super::{Arguments, run};
    use super::*;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let left_out = vec!["proc/net/dev: 5242880 bytes, at most 4194304 are taken".to_owned()];
        is_pinned("sysdump", &Written { file: "node.tar.gz".into(), files: 41, bytes: 181_204, left_out });
    }

    /// The files of an archive.
    fn unpacked(archive: &Path) -> BTreeMap<String, String> {
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(fs::File::open(archive).unwrap()).read_to_end(&mut bytes).unwrap();
        tar::tests::read(&bytes)
    }

    #[test]
    fn without_an_agent_there_is_an_archive_without_secrets_that_says_what_it_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("net.d")).unwrap();
        fs::create_dir_all(path("manifests")).unwrap();
        fs::create_dir_all(path("state/journal")).unwrap();
        fs::write(path("net.d/05-x.conf"), r#"{"type": "x", "password": "hunter2", "name": "n"}"#).unwrap();
        fs::write(
            path("manifests/a.yaml"),
            "kind: Secret\ndata: {a: aHVudGVyMg==}\n---\nkind: Pod\ntoken: hunter2\n",
        )
        .unwrap();
        fs::write(
            path("state/journal/c@eth0.jsonl"),
            "[\"x\",{\"env\":\"Authorization: Bearer hunter2\"}]\n",
        )
        .unwrap();
        let text = format!(
            "source: {0}/manifests\nstateDir: {0}/state\nbpffs: {0}/bpf\ncniConf: {{dir: {0}/net.d}}\n",
            dir.path().display()
        );
        fs::write(path("netattachd.yaml"), text).unwrap();
        let archive = path("dump.tar.gz");
        let words = [
            "netattachctl",
            "--socket",
            path("agent.sock").to_str().unwrap(),
            "sysdump",
            "--file",
            archive.to_str().unwrap(),
            "--config",
            path("netattachd.yaml").to_str().unwrap(),
        ]
        .map(str::to_owned);
        let mut out = Vec::new();
        run(&Arguments::try_parse_from(&words).unwrap(), &mut out).unwrap();
        let files = unpacked(&archive);
        for name in [
            "about.txt",
            "doctor.json",
            "settings.json",
            "cni-conf/05-x.conf",
            "manifests/a.yaml",
            "journal/c@eth0.jsonl",
            "machine/version",
            "left-out.txt",
            "pins.txt",
        ] {
            assert!(files.contains_key(name), "{name}: {:?}", files.keys());
        }
        let all: String = files.values().cloned().collect();
        assert!(!all.contains("hunter2") && !all.contains("aHVudGVyMg"), "{all}");
        assert!(
            files["cni-conf/05-x.conf"].contains("REDACTED") && files["cni-conf/05-x.conf"].contains("\"n\"")
        );
        assert!(files["left-out.txt"].contains("agent/status.json: the agent does not answer"));
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("dump.tar.gz: ") && text.contains("left out: agent/status.json"), "{text}");
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&archive).unwrap().permissions().mode() & 0o777, 0o600);
        // An archive is never replaced.
        let error = run(&Arguments::try_parse_from(&words).unwrap(), &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("dump.tar.gz"), "{error}");
    }

    #[test]
    fn a_full_archive_says_so() {
        let mut dump = Dump {
            archive: tar::Writer::new(GzEncoder::new(Vec::new(), Compression::fast())),
            files: 0,
            bytes: MOST_TOTAL - 10,
            left_out: Vec::new(),
            now_s: 0,
        };
        dump.add("a", &[0; 10]).unwrap();
        dump.add("b", &[0; 1]).unwrap();
        assert_eq!((dump.files, dump.left_out), (1, vec!["b: the archive is full".to_owned()]));
    }
}
