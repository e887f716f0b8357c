//! Asks from time to time whether the cluster has other nodes, as a watch would receive every heartbeat.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::client::{Ask, Client, RequestError};
use super::resource::{METADATA_LIST, NODES_PATH};
use super::view::View;
use crate::error_chain::Chain;

/// How often it is asked.
const INTERVAL: Duration = Duration::from_secs(300);
/// How soon again after a failure.
const AGAIN: Duration = Duration::from_secs(30);
/// Most bytes of the metadata of two nodes.
const ANSWER: usize = 2 << 20;
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Tells the view whether there are other nodes, forever.
pub(super) async fn look_for_others(client: Arc<Client>, view: Arc<View>) {
    loop {
        let pause = match has_others(&client).await {
            Ok(has_others) => {
                view.change(|cache| cache.set_other_nodes(has_others));
                INTERVAL
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "whether there are other nodes is not known");
                AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn has_others(client: &Client) -> Result<bool, RequestError> {
    #[derive(Deserialize)]
    struct Listed {
        #[serde(default)]
        items: Vec<IgnoredAny>,
    }
    let ask = Ask { accept: METADATA_LIST, ..Ask::get(format!("{NODES_PATH}?limit=2")) };
    let body = client.read(&ask, ANSWER, PATIENCE).await?;
    let listed: Listed = serde_json::from_slice(&body).map_err(|source| ask.undecodable(source))?;
    Ok(listed.items.len() > 1)
}
