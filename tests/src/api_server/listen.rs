//! Listeners and connections: TLS, and how connections end on purpose.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use netattach::netns::{Netns, within};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::serve::serve;
use super::state::Shared;
use crate::traffic::once_free;

/// A connection, with the means to end it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) number: u64,
    reset: Notify,
    close: Notify,
}

impl Connection {
    /// Ends the connection with RST.
    pub(super) fn reset(&self) {
        self.reset.notify_one();
    }

    /// Ends the connection with FIN.
    pub(super) fn close(&self) {
        self.close.notify_one();
    }
}

/// A place to listen at.
#[derive(Debug)]
pub(super) struct Place {
    /// `None`: the namespace of this process.
    pub(super) netns: Option<Netns>,
    pub(super) address: SocketAddr,
}

/// A listener that accepts connections.
#[derive(Debug)]
pub(super) struct Listener {
    accepting: JoinHandle<()>,
}

impl Listener {
    /// Listens at a place; returns the address, whose port may have been 0.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        place: &Place,
        shared: &Arc<Shared>,
        runtime: &Handle,
    ) -> anyhow::Result<(Self, SocketAddr)> {
        // The port of a closed listener may be bound again.
        let bind = || once_free(|| std::net::TcpListener::bind(place.address));
        let socket = match &place.netns {
            Some(netns) => within(netns, bind)??,
            None => bind()?,
        };
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let shared = Arc::clone(shared);
        let _entered = runtime.enter();
        let socket = TcpListener::from_std(socket)?;
        Ok((Self { accepting: runtime.spawn(accept(socket, shared)) }, address))
    }

    /// Closes the listener: connections are refused. Open connections stay.
    pub(super) fn close(self, runtime: &Handle) {
        let (done, is_done) = std::sync::mpsc::channel();
        self.accepting.abort();
        runtime.spawn(async move {
            // It has been stopped.
            let _ = self.accepting.await;
            let _ = done.send(());
        });
        // An error means that the runtime has ended, and the listener with it.
        let _ = is_done.recv();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let connection = {
            let mut connections = shared.connections();
            connections.accepted += 1;
            let number = connections.accepted;
            let connection = Arc::new(Connection { number, reset: Notify::new(), close: Notify::new() });
            connections.open.insert(number, Arc::clone(&connection));
            connection
        };
        tokio::spawn(run(stream, connection, Arc::clone(&shared)));
    }
}

/// Serves a connection until it ends, or is ended.
async fn run(stream: TcpStream, connection: Arc<Connection>, shared: Arc<Shared>) {
    // Events are small and are wanted at once.
    let _ = stream.set_nodelay(true);
    let socket: Option<OwnedFd> = stream.as_fd().try_clone_to_owned().ok();
    tokio::select! {
        () = speak(stream, &connection, &shared) => {}
        () = connection.close.notified() => {}
        () = connection.reset.notified() => {
            if let Some(socket) = &socket {
                // Lingering for no time turns the end into RST.
                let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
            }
        }
    }
    drop(socket);
    shared.connections().open.remove(&connection.number);
}

async fn speak(stream: TcpStream, connection: &Arc<Connection>, shared: &Arc<Shared>) {
    let acceptor = TlsAcceptor::from(Arc::clone(&shared.tls()));
    // A client that does not trust the certificate closes the connection here.
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let service = service_fn(|request| serve(Arc::clone(shared), Arc::clone(connection), request));
    // Clients may end a connection at any time.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}
