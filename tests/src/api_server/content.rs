//! Bodies of answers, whole or streamed, and the faults applied to them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use serde_json::Value;
use tokio::sync::mpsc;

use super::faults::{CutOff, Fault};
use super::listen::Connection;
use super::status::Failure;

/// Chunks that wait for the client.
const WAITING: usize = 16;
/// Interval between the pieces of a slow body.
const PIECE: Duration = Duration::from_millis(50);
/// Pause before a reset, so that data sent earlier arrives.
const BEFORE_RESET: Duration = Duration::from_millis(50);

/// The body of an answer.
#[derive(Debug)]
pub(super) struct Content {
    chunks: mpsc::Receiver<Bytes>,
    length: Option<u64>,
}

/// Writes the body of an answer.
#[derive(Debug)]
pub(super) struct Writer {
    chunks: mpsc::Sender<Bytes>,
    connection: Arc<Connection>,
    /// Bytes a second.
    rate: Option<usize>,
    cut: Option<(usize, CutOff)>,
    events: usize,
}

/// The body has ended, or its reader is gone.
#[derive(Debug)]
pub(super) struct Ended;

impl Content {
    /// A body that is there.
    pub(super) fn whole(bytes: Bytes) -> Self {
        let length = Some(bytes.len() as u64);
        let (sender, chunks) = mpsc::channel(1);
        if !bytes.is_empty() {
            // There is room, and the receiver lives.
            let _ = sender.try_send(bytes);
        }
        Self { chunks, length }
    }

    /// A body that is written in pieces, with these faults applied.
    pub(super) fn streamed(connection: &Arc<Connection>, faults: &[Fault]) -> (Writer, Self) {
        let (sender, chunks) = mpsc::channel(WAITING);
        let mut writer =
            Writer { chunks: sender, connection: Arc::clone(connection), rate: None, cut: None, events: 0 };
        for fault in faults {
            match fault {
                Fault::Slow(rate) => writer.rate = Some(*rate),
                Fault::CutOff { after, how } => writer.cut = Some((*after, *how)),
                _ => {}
            }
        }
        (writer, Self { chunks, length: None })
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.chunks.poll_recv(context).map(|chunk| chunk.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::new, SizeHint::with_exact)
    }
}

impl Writer {
    /// Writes a whole answer, or the half of it that a fault lets through.
    pub(super) async fn answer(mut self, bytes: Bytes) {
        let Some((_, how)) = self.cut else {
            let _: Result<(), Ended> = self.write(bytes).await;
            return;
        };
        if self.write(bytes.slice(..bytes.len() / 2)).await.is_ok() {
            self.end(how, Bytes::new()).await;
        }
    }

    /// Writes an event of a watch.
    pub(super) async fn event(&mut self, kind: &str, object: &Value) -> Result<(), Ended> {
        self.begin().await?;
        self.write(line(kind, object)).await?;
        self.events += 1;
        self.begin().await
    }

    /// Ends the watch here if a fault says so.
    pub(super) async fn begin(&mut self) -> Result<(), Ended> {
        match self.cut {
            Some((after, how)) if self.events >= after => {
                self.end(how, Bytes::from_static(b"{\"type\":\"MODIFIED\",\"object\":{\"kind\":\"P")).await;
                Err(Ended)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the reader is gone.
    pub(super) async fn abandoned(&self) {
        self.chunks.closed().await;
    }

    async fn end(&mut self, how: CutOff, half: Bytes) {
        match how {
            CutOff::End => {}
            CutOff::Reset => {
                tokio::time::sleep(BEFORE_RESET).await;
                self.connection.reset();
                self.abandoned().await;
            }
            CutOff::Silence => {
                if self.write(half).await.is_ok() {
                    self.abandoned().await;
                }
            }
            CutOff::Error(code) if !half.is_empty() => {
                let _: Result<(), Ended> = self.write(line("ERROR", &Failure::of_code(code).status())).await;
            }
            CutOff::Error(_) => {}
        }
    }

    async fn write(&mut self, mut bytes: Bytes) -> Result<(), Ended> {
        let piece = self.rate.map_or(usize::MAX, |rate| (rate / 20).max(1));
        while !bytes.is_empty() {
            let next = bytes.split_to(piece.min(bytes.len()));
            self.chunks.send(next).await.map_err(|_| Ended)?;
            if self.rate.is_some() {
                tokio::time::sleep(PIECE).await;
            }
        }
        Ok(())
    }
}

fn line(kind: &str, object: &Value) -> Bytes {
    let mut line = format!("{{\"type\":\"{kind}\",\"object\":{object}}}");
    line.push('\n');
    Bytes::from(line)
}
