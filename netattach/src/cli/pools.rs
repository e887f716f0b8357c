//! `netattachctl pools`: how full the pools of addresses are, and who holds what.

use std::path::Path;

use clap::Args;

use super::filter::{Chosen, Filter, is_network, short_id};
use super::missing;
use super::output::Format;
use super::table::{self, Align, Column, Width};
use super::{Answer, CliError, ask, or_dash, other, visible};
use crate::rpc::message::pools::{Holder, Pool, Range};
use crate::rpc::message::{Request, Response};

/// Which pools to show. A filter by pod, namespace, labels or container leaves the pools where such a pod holds an address.
#[derive(Debug, Args)]
pub(super) struct Pools {
    #[command(flatten)]
    filter: Filter,
    /// Show who holds each address, too
    #[arg(long)]
    holders: bool,
}

const NOTHING: &str = "No pool of addresses. Networks with host-local have one; those of executed address managers are not known \
                       here.\n";

const COLUMNS: [Column; 9] = [
    Column::new("NETWORKS", Align::Left),
    Column::new("RANGE", Align::Left),
    Column::new("SIZE", Align::Right),
    Column::new("USED", Align::Right),
    Column::new("FREE", Align::Right),
    Column::new("FREE-RUNS", Align::Right),
    Column::new("LONGEST-RUN", Align::Left),
    Column::wide("GATEWAY", Align::Left),
    Column::wide("DIRECTORY", Align::Left),
];

impl Pools {
    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    pub(super) fn run(&self, socket: &Path, format: Format) -> Result<Answer, CliError> {
        let chosen = self.filter.choose(socket)?;
        let Response::Pools(pools) = ask(socket, &Request::Pools)? else { return other(&Request::Pools) };
        let known: Vec<String> = pools.iter().map(name).collect();
        let pools = self.retain(pools, &chosen);
        let found = if pools.is_empty() && self.filter.is_set() {
            Err(CliError::NotFound(format!(
                "no pool of this node matches; {}",
                if known.is_empty() {
                    "there is none".to_owned()
                } else {
                    format!("there are those of {}", missing::list(&known))
                }
            )))
        } else {
            Ok(())
        };
        let text = |width| self.render(&pools, width);
        Ok((format.list(&pools, pools.iter().map(name), text)?, found))
    }

    /// The pools of the network in which a chosen attachment holds an address, with those holders.
    fn retain(&self, mut pools: Vec<Pool>, chosen: &Chosen) -> Vec<Pool> {
        if let Some(network) = &chosen.network {
            pools.retain(|pool| pool.networks.iter().any(|name| is_network(name, network)));
        }
        let by_holder = Chosen {
            network: None,
            namespace: chosen.namespace.clone(),
            pod: chosen.pod.clone(),
            selected: chosen.selected.clone(),
            container: None,
        };
        let matches = |holder: &Holder| {
            by_holder.matches(&holder.name)
                && chosen.container.as_ref().is_none_or(|(id, _)| holder.container_id == *id)
        };
        let is_by_holder = chosen.namespace.is_some()
            || chosen.pod.is_some()
            || chosen.selected.is_some()
            || chosen.container.is_some();
        if is_by_holder {
            for pool in &mut pools {
                pool.holders.retain(matches);
            }
            pools.retain(|pool| !pool.holders.is_empty());
        }
        pools
    }

    fn render(&self, pools: &[Pool], width: Width) -> String {
        if pools.is_empty() {
            return if self.filter.is_set() { String::new() } else { NOTHING.to_owned() };
        }
        let rows: Vec<_> = pools.iter().flat_map(rows).collect();
        let mut text = table::of_columns(COLUMNS, &rows, width);
        for pool in pools {
            if let Some(problem) = &pool.problem {
                let problem = visible::line(&format!("{}: {problem}", pool.directory.display()));
                text.push('\n');
                text.push_str(&table::sentences(&problem, width));
            }
        }
        if self.holders {
            let holders: Vec<_> = pools
                .iter()
                .flat_map(|pool| pool.holders.iter().map(|holder| cells(holder, width)))
                .collect();
            if !holders.is_empty() {
                let columns = [
                    Column::new("ADDRESS", Align::Left),
                    Column::new("POD", Align::Left),
                    Column::new("NETWORK", Align::Left),
                    Column::new("INTERFACE", Align::Left),
                    Column::new("CONTAINER", Align::Left),
                ];
                text.push('\n');
                text.push_str(&table::of_columns(columns, &holders, width));
            }
            let left_out: u64 = pools.iter().map(|pool| pool.left_out).sum();
            if left_out > 0 {
                text.push_str(&format!("{left_out} more are held\n"));
            }
        }
        text
    }
}

/// The networks of a pool, or its directory if none has it.
fn name(pool: &Pool) -> String {
    match pool.networks.as_slice() {
        [] => pool.directory.display().to_string(),
        networks => networks.join(","),
    }
}

fn rows(pool: &Pool) -> Vec<[String; 9]> {
    let directory = pool.directory.display().to_string();
    let of = |range: &Range| {
        [
            name(pool),
            format!("{}-{}", range.first, range.last),
            count(range.size),
            range.used.to_string(),
            count(range.free),
            range.free_runs.to_string(),
            match range.longest_free {
                Some(first) => format!("{} from {first}", count(range.longest_free_size)),
                None => "-".to_owned(),
            },
            range.gateway.to_string(),
            directory.clone(),
        ]
    };
    if pool.ranges.is_empty() {
        let dash = || "-".to_owned();
        let held = pool.holders.len() as u64 + pool.left_out;
        return vec![[
            name(pool),
            "no definition names it".to_owned(),
            dash(),
            held.to_string(),
            dash(),
            dash(),
            dash(),
            dash(),
            directory,
        ]];
    }
    pool.ranges.iter().map(of).collect()
}

/// A count; the largest number stands for that many or more.
fn count(count: u64) -> String {
    if count == u64::MAX { "2^64+".to_owned() } else { count.to_string() }
}

fn cells(holder: &Holder, width: Width) -> [String; 5] {
    let id = match width {
        Width::Limited => short_id(&holder.container_id),
        Width::Unlimited => holder.container_id.clone(),
    };
    [
        holder.address.to_string(),
        or_dash(holder.name.pod.as_ref()),
        holder.name.network.clone(),
        holder.name.ifname.clone(),
        or_dash(Some(id).filter(|id| !id.is_empty())),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::Exit;
    use super::super::tests::run_with;
    use super::*;

    fn pools() -> Vec<Pool> {
        let holder = |address: &str, pod: &str, container: &str| Holder {
            address: address.parse().unwrap(),
            name: super::super::tests::name(1, pod, "shop/lan", "net1"),
            container_id: container.to_owned(),
        };
        let range = Range {
            set: 0,
            first: "10.0.0.2".parse().unwrap(),
            last: "10.0.0.9".parse().unwrap(),
            gateway: "10.0.0.1".parse().unwrap(),
            size: 8,
            used: 2,
            free: 6,
            free_runs: 2,
            longest_free: "10.0.0.5".parse().ok(),
            longest_free_size: 5,
        };
        vec![
            Pool {
                networks: vec!["shop/lan".into()],
                directory: "/var/lib/cni/networks/lan".into(),
                ranges: vec![range],
                holders: vec![
                    holder("10.0.0.2", "shop/cart", "0123456789abcdef"),
                    holder("10.0.0.4", "", "c2"),
                ],
                left_out: 0,
                problem: None,
            },
            Pool {
                networks: vec![],
                directory: "/var/lib/cni/networks/old".into(),
                ranges: vec![],
                holders: vec![],
                left_out: 3,
                problem: None,
            },
        ]
    }

    fn shown(words: &[&str]) -> (String, Result<(), CliError>) {
        run_with(|_| Response::Pools(pools()), &[&["pools"], words].concat())
    }

    #[test]
    fn ranges_are_lines_and_holders_are_named_when_asked_for() {
        let ranges = "\
NETWORKS                   RANGE                   SIZE  USED  FREE  FREE-RUNS  LONGEST-RUN
shop/lan                   10.0.0.2-10.0.0.9          8     2     6          2  5 from 10.0.0.5
/var/lib/cni/networks/old  no definition names it     -     3     -          -  -
";
        assert_eq!(shown(&[]).0, ranges);
        let holders = "
ADDRESS   POD        NETWORK   INTERFACE  CONTAINER
10.0.0.2  shop/cart  shop/lan  net1       0123456789ab
10.0.0.4  -          shop/lan  net1       c2
3 more are held
";
        assert_eq!(shown(&["--holders"]).0, format!("{ranges}{holders}"));
        assert_eq!(shown(&["-o", "name"]).0, "shop/lan\n/var/lib/cni/networks/old\n");
    }

    #[test]
    fn a_filter_leaves_the_pools_where_it_holds_an_address() {
        assert_eq!(shown(&["--network", "lan", "-o", "name"]).0, "shop/lan\n");
        assert_eq!(shown(&["--pod", "shop/cart", "-o", "name"]).0, "shop/lan\n");
        let (text, result) = shown(&["-n", "ops"]);
        let error = result.unwrap_err();
        assert_eq!((text.as_str(), error.exit()), ("", Exit::NotFound));
        assert_eq!(
            error.to_string(),
            "no pool of this node matches; there are those of shop/lan, /var/lib/cni/networks/old"
        );
    }
}
