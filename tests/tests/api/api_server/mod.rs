//! The tests' API server, with plain requests: the semantics that clients of a real server rely on, and each fault.
//!
//! | module | tests |
//! |---|---|
//! | `reading` | GET, lists, selectors, pages, what is not served |
//! | `watching` | watches |
//! | `writing` | POST, PATCH, DELETE |
//! | `failing` | faults on demand, tokens, certificates, the log |

mod failing;
mod reading;
mod watching;
mod writing;

use netattach_tests::api_server::{ApiServer, Options};
use serde_json::{Value, json};

use crate::client::Client;

/// A server and a client of it.
fn rig() -> (ApiServer, Client) {
    let server = ApiServer::start(&Options::default()).unwrap();
    let client = Client::of(&server);
    (server, client)
}

/// A pod in the namespace `shop` on a node, with a label `app`.
fn pod(name: &str, node: &str, app: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}"), "labels": {"app": app}},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
        "status": {"phase": "Running"}
    })
}

/// Names of a list's items.
fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect()
}
