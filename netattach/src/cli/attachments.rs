//! `netattachctl attachments`: the table of attachments.

use std::path::Path;

use ipnet::IpNet;

use super::filter::{Filter, attachments, line_name, short_id};
use super::output::Format;
use super::table::{self, Align, Column, Width};
use super::{Answer, CliError, name_cells, or_dash};
use crate::rpc::message::Attachment;

const COLUMNS: [Column; 13] = [
    Column::new("POD", Align::Left),
    Column::new("NETWORK", Align::Left),
    Column::new("INTERFACE", Align::Left),
    Column::new("KIND", Align::Left),
    Column::new("ADDRESSES", Align::Left),
    Column::wide("MAC", Align::Left),
    Column::wide("HOST-INTERFACE", Align::Left),
    Column::new("ENFORCED", Align::Left),
    Column::wide("FAST-PATH", Align::Left),
    Column::new("STATE", Align::Left),
    Column::wide("ID", Align::Right),
    Column::new("CONTAINER", Align::Left),
    Column::wide("WHY-NOT-FULL", Align::Left),
];

pub(super) fn run(filter: &Filter, socket: &Path, format: Format) -> Result<Answer, CliError> {
    let chosen = filter.choose(socket)?;
    let rows = attachments(socket)?;
    let found = chosen.found(rows.iter().map(|row| &row.name));
    let rows = chosen.retain(rows, |row| &row.name);
    let names = rows.iter().map(|row| line_name(&row.name));
    Ok((format.list(&rows, names, |width| render(&rows, filter.nothing(), width))?, found))
}

/// The table, or `nothing` if there are no rows.
fn render(rows: &[Attachment], nothing: &str, width: Width) -> String {
    if rows.is_empty() {
        return nothing.to_owned();
    }
    let cells: Vec<_> = rows.iter().map(|attachment| row(attachment, width)).collect();
    table::of_columns(COLUMNS, &cells, width)
}

fn row(attachment: &Attachment, width: Width) -> [String; 13] {
    let [pod, network, ifname] = name_cells(&attachment.name);
    let container = match width {
        Width::Unlimited => attachment.container_id.clone(),
        Width::Limited => short_id(&attachment.container_id),
    };
    [
        pod,
        network,
        ifname,
        attachment.kind.to_string(),
        addresses(&attachment.addresses, width),
        or_dash(attachment.mac),
        or_dash(attachment.host_interface.as_ref()),
        attachment.enforcement.to_string(),
        or_dash(attachment.fast_path.as_ref().map(|fast_path| &fast_path.state)),
        attachment.state.to_string(),
        or_dash(attachment.name.id),
        container,
        or_dash(Some(&attachment.enforcement_detail).filter(|text| !text.is_empty())),
    ]
}

/// Returns all addresses; if the line is limited, the first, and the number of the others.
fn addresses(addresses: &[IpNet], width: Width) -> String {
    match (addresses, width) {
        ([], _) => "-".to_owned(),
        ([first, more @ ..], Width::Limited) if !more.is_empty() => format!("{first} +{}", more.len()),
        _ => addresses.iter().map(IpNet::to_string).collect::<Vec<_>>().join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;
    use crate::mac::Mac;
    use crate::rpc::message::{FastPath, Kind, Level, State};

    #[test]
    fn every_attachment_is_a_line() {
        let rows = [
            Attachment {
                name: name(1, "shop/cart-0", "default", "eth0"),
                container_id: "0123456789abcdef".to_owned(),
                kind: Kind::Native("bridge".to_owned()),
                mac: Some(Mac([2, 0, 0, 0, 0, 1])),
                addresses: vec!["10.1.0.2/24".parse().unwrap(), "2001:db8::2/64".parse().unwrap()],
                host_interface: Some("na1f00d".to_owned()),
                enforcement: Level::Full,
                enforcement_detail: String::new(),
                programs_wait: false,
                fast_path: Some(FastPath { state: "on".to_owned(), detail: String::new() }),
                state: State::Attached,
            },
            Attachment {
                name: name(2, "", "shop/storage", "net1"),
                container_id: "def".to_owned(),
                kind: Kind::Exec("sriov".to_owned()),
                mac: None,
                addresses: vec![],
                host_interface: None,
                enforcement: Level::None,
                enforcement_detail: "the pod has no interface of that name".to_owned(),
                programs_wait: false,
                fast_path: None,
                state: State::Attaching,
            },
        ];
        assert_eq!(
            render(&rows, "nothing", Width::Limited),
            "\
POD          NETWORK       INTERFACE  KIND        ADDRESSES       ENFORCED  STATE      CONTAINER
shop/cart-0  default       eth0       bridge      10.1.0.2/24 +1  full      attached   0123456789ab
-            shop/storage  net1       exec:sriov  -               none      attaching  def
"
        );
        assert_eq!(
            render(&rows, "nothing", Width::Unlimited),
            "\
POD          NETWORK       INTERFACE  KIND        ADDRESSES                   MAC                HOST-INTERFACE  ENFORCED  FAST-PATH  STATE      ID  CONTAINER         WHY-NOT-FULL
shop/cart-0  default       eth0       bridge      10.1.0.2/24,2001:db8::2/64  02:00:00:00:00:01  na1f00d         full      on         attached    1  0123456789abcdef  -
-            shop/storage  net1       exec:sriov  -                           -                  -               none      -          attaching   2  def               the pod has no interface of that name
"
        );
        assert_eq!(render(&[], "nothing", Width::Limited), "nothing");
    }
}
