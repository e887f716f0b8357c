//! TCP between pods, from threads inside their network namespaces.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::stage::{inside, joined};

const GREETING: &str = "welcome\n";
/// On one machine an answer takes well under a millisecond; a dropped packet never comes.
const SILENCE: Duration = Duration::from_millis(300);
/// Time between two checks of a verdict that is about to change.
const BLINK: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(5);

/// The outcome of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The server greeted.
    Answered,
    /// Nothing came back.
    Silence,
    /// Something else.
    Failed(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered => f.write_str("answered"),
            Self::Silence => f.write_str("silence"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Serves a greeting and an echo on a port of a pod, both families, until the program ends.
pub(super) fn serve(pod: &str, port: u16) -> anyhow::Result<()> {
    let listening = inside(pod, move || {
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).with_context(|| format!("listen on port {port}"))
    });
    let listener = joined(listening)?;
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            thread::spawn(move || converse(connection));
        }
    });
    Ok(())
}

fn converse(mut connection: TcpStream) -> io::Result<()> {
    connection.write_all(GREETING.as_bytes())?;
    let mut heard = connection.try_clone()?;
    io::copy(&mut heard, &mut connection).map(drop)
}

/// Tries to connect once and to be greeted.
pub(super) fn attempt(pod: &str, to: SocketAddr) -> anyhow::Result<Verdict> {
    joined(inside(pod, move || Ok(look(to, SILENCE))))
}

/// Connects again and again until greeted, and returns how long that took since `start`.
pub(super) fn first_answer(pod: &str, to: SocketAddr, start: Instant) -> anyhow::Result<Duration> {
    joined(inside(pod, move || {
        loop {
            if look(to, BLINK) == Verdict::Answered {
                return Ok(start.elapsed());
            }
            if start.elapsed() > PATIENCE {
                bail!("{to} does not answer within {} s", PATIENCE.as_secs());
            }
        }
    }))
}

fn look(to: SocketAddr, patience: Duration) -> Verdict {
    match Conversation::begin(to, patience) {
        Ok(_) => Verdict::Answered,
        Err(error) if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => {
            Verdict::Silence
        }
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

/// A connection that stays.
pub(super) struct Conversation {
    connection: BufReader<TcpStream>,
}

impl Conversation {
    /// Connects from a pod.
    pub(super) fn from(pod: &str, to: SocketAddr) -> anyhow::Result<Self> {
        joined(inside(pod, move || Self::begin(to, PATIENCE).with_context(|| format!("connect to {to}"))))
    }

    fn begin(to: SocketAddr, patience: Duration) -> io::Result<Self> {
        let connection = TcpStream::connect_timeout(&to, patience)?;
        connection.set_read_timeout(Some(patience))?;
        let mut conversation = Self { connection: BufReader::new(connection) };
        match conversation.hear()?.as_str() {
            GREETING => Ok(conversation),
            other => Err(io::Error::other(format!("greeted with {other:?}"))),
        }
    }

    /// Sends a line and returns the echo.
    pub(super) fn say(&mut self, word: &str) -> anyhow::Result<String> {
        let line = format!("{word}\n");
        self.connection.get_mut().write_all(line.as_bytes()).context("speak on an open connection")?;
        Ok(self.hear().context("listen on an open connection")?.trim_end().to_owned())
    }

    fn hear(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.connection.read_line(&mut line).map(|_| line)
    }
}
