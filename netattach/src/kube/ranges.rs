//! Reads the ranges of the cluster's Services and of this node from time to time, as they hardly ever
//! change. They determine which routes stay on the cluster's interface when a pod's default route moves.

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::{Ask, Client, RequestError};
use super::resource::{NODES_PATH, escaped};
use super::view::View;
use crate::error_chain::Chain;
use crate::objects::ClusterRanges;
use crate::source::read::manifest::Object;
use crate::source::read::{Kind, api_object};

/// The path of ServiceCIDRs, from Kubernetes 1.33 on.
const SERVICES_PATH: &str = "/apis/networking.k8s.io/v1/servicecidrs?limit=64";
/// How often it is asked.
const INTERVAL: Duration = Duration::from_secs(300);
/// How soon again after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const ANSWER: usize = 2 << 20;
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct List<T> {
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Deserialize)]
struct ServiceCidr {
    spec: Option<ServiceCidrSpec>,
}

#[derive(Deserialize)]
struct ServiceCidrSpec {
    #[serde(default)]
    cidrs: Vec<String>,
}

/// Tells the view the ranges, forever.
pub(super) async fn follow(client: Arc<Client>, view: Arc<View>, node: Arc<str>) {
    loop {
        let pause = match ask(&client, &node).await {
            Ok(ranges) => {
                view.change(|cache| cache.set_ranges(ranges));
                INTERVAL
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "the cluster's ranges are not known");
                AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn ask(client: &Client, node: &str) -> Result<ClusterRanges, RequestError> {
    let ask = Ask::get(SERVICES_PATH);
    let services = match answer(client, &ask).await? {
        Some(body) => services(&body).map_err(|source| ask.undecodable(source))?,
        None => Vec::new(),
    };
    let field = escaped(&format!("metadata.name={node}"));
    let ask = Ask::get(format!("{NODES_PATH}?fieldSelector={field}&limit=1"));
    let own_node = match answer(client, &ask).await? {
        Some(body) => own_node(&body).map_err(|source| ask.undecodable(source))?,
        None => Vec::new(),
    };
    Ok(ClusterRanges { services, own_node })
}

/// Returns the body of an answer; `None` if the server does not serve the kind, or refuses it to this
/// agent, which is reported with the other missing rights.
async fn answer(client: &Client, ask: &Ask) -> Result<Option<Vec<u8>>, RequestError> {
    match client.read(ask, ANSWER, PATIENCE).await {
        Ok(body) => Ok(Some(body.to_vec())),
        Err(error) if matches!(error.code(), Some(403 | 404)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn services(body: &[u8]) -> Result<Vec<IpNet>, serde_json::Error> {
    let list: List<ServiceCidr> = serde_json::from_slice(body)?;
    let texts = list.items.into_iter().filter_map(|item| item.spec).flat_map(|spec| spec.cidrs);
    // The server validates these values.
    Ok(texts.filter_map(|text| text.parse::<IpNet>().ok()).map(|net| net.trunc()).collect())
}

fn own_node(body: &[u8]) -> Result<Vec<IpNet>, serde_json::Error> {
    let list: List<Box<RawValue>> = serde_json::from_slice(body)?;
    let nodes = list.items.iter().filter_map(|item| match api_object(Kind::Node, item) {
        Ok(Object::Node(node)) => Some(node),
        Ok(_) => None,
        Err(error) => {
            tracing::debug!(error = %Chain(&error), "this node cannot be read");
            None
        }
    });
    Ok(nodes.flat_map(|node| node.ranges().collect::<Vec<_>>()).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn services_and_the_node_have_their_ranges() {
        let list = json!({"kind": "ServiceCIDRList", "items": [
            {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12", "fd00:96::/112"]}},
            {"metadata": {"name": "more"}, "spec": {"cidrs": ["10.200.0.0/24", "nonsense"]}},
            {"metadata": {"name": "empty"}}
        ]});
        let expected = nets(&["10.96.0.0/12", "fd00:96::/112", "10.200.0.0/24"]);
        assert_eq!(services(list.to_string().as_bytes()).unwrap(), expected);
        assert_eq!(services(b"{}").unwrap(), []);

        let list = json!({"items": [{
            "metadata": {"name": "a"},
            "spec": {"podCIDRs": ["10.1.2.0/24", "fd00:1::/64"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "a"}]}
        }]});
        let expected = nets(&["10.1.2.0/24", "fd00:1::/64", "192.0.2.1/32"]);
        assert_eq!(own_node(list.to_string().as_bytes()).unwrap(), expected);
        assert_eq!(own_node(br#"{"items": []}"#).unwrap(), []);
    }
}
