//! State shared by the parts of the server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio_rustls::rustls::ServerConfig;

use super::faults::Faults;
use super::kinds::Kind;
use super::listen::Connection;
use super::log::Log;
use super::store::Store;
use super::write::ForeignUid;
use crate::admission::{Policies, Review};

/// Settings that do not change.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Time between bookmarks of a watch.
    pub(super) bookmarks: Duration,
    /// Minor version, for `/version`; from 32 on lists are streamed if that is requested.
    pub(super) minor: u32,
    pub(super) foreign_uid: ForeignUid,
}

/// The state of a server.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) faults: Faults,
    pub(super) log: Log,
    store: Mutex<Store>,
    version: watch::Sender<u64>,
    unserved: Mutex<BTreeSet<(&'static str, &'static str)>>,
    tokens: Mutex<BTreeSet<String>>,
    denied: Mutex<BTreeSet<(String, String)>>,
    admission: Mutex<Option<Admission>>,
    tls: Mutex<Arc<ServerConfig>>,
    connections: Mutex<Connections>,
}

/// The policies that writes of clients have to pass, and the writes that they were applied to.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) policies: Policies,
    /// The identity of all clients.
    pub(super) user: Value,
    pub(super) reviews: Mutex<Vec<Review>>,
}

/// Connections that have been accepted.
#[derive(Debug, Default)]
pub(super) struct Connections {
    pub(super) accepted: u64,
    pub(super) open: BTreeMap<u64, Arc<Connection>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(settings: Settings, tls: Arc<ServerConfig>, token: &str) -> Self {
        Self {
            settings,
            faults: Faults::new(),
            log: Log::default(),
            store: Mutex::new(Store::new()),
            version: watch::Sender::new(0),
            unserved: Mutex::default(),
            tokens: Mutex::new(BTreeSet::from([token.to_owned()])),
            denied: Mutex::default(),
            admission: Mutex::default(),
            tls: Mutex::new(tls),
            connections: Mutex::default(),
        }
    }

    /// The objects, to read.
    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        locked(&self.store)
    }

    /// Changes the objects, and notifies watches.
    pub(super) fn change<T>(&self, work: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store();
        let result = work(&mut store);
        self.version.send_replace(store.version());
        result
    }

    /// Changes with every change of the objects, or of the served kinds.
    pub(super) fn news(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn is_served(&self, kind: &Kind, version: &str) -> bool {
        !locked(&self.unserved).contains(&(kind.resource, version))
    }

    /// Serves a version of a kind from now on, or stops serving it. Watches of it end then.
    pub(super) fn serve(&self, kind: &'static Kind, version: &'static str, served: bool) {
        let mut unserved = locked(&self.unserved);
        if served {
            unserved.remove(&(kind.resource, version));
        } else {
            unserved.insert((kind.resource, version));
        }
        drop(unserved);
        self.change(|_| ());
    }

    pub(super) fn tokens(&self) -> MutexGuard<'_, BTreeSet<String>> {
        locked(&self.tokens)
    }

    /// The rights that clients do not have: verb and resource.
    pub(super) fn denied(&self) -> MutexGuard<'_, BTreeSet<(String, String)>> {
        locked(&self.denied)
    }

    pub(super) fn admission(&self) -> MutexGuard<'_, Option<Admission>> {
        locked(&self.admission)
    }

    pub(super) fn tls(&self) -> MutexGuard<'_, Arc<ServerConfig>> {
        locked(&self.tls)
    }

    pub(super) fn connections(&self) -> MutexGuard<'_, Connections> {
        locked(&self.connections)
    }
}
