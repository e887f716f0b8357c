//! Networks as text, parsed like Go's `net.ParseCIDR`, in configurations, results of plugins, policies and settings;
//! and the default gateway address of a network. Pure. The agent's own files, such as its journal, are read as
//! written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer};

/// Parses an address with a prefix length. Host bits are kept. Octets with leading zeros are refused: some parsers
/// read them as octal.
pub(crate) fn parse(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    let digits =
        !length.is_empty() && length.len() <= 3 && length.bytes().all(|digit| digit.is_ascii_digit());
    let length = length.parse().ok().filter(|_| digits)?;
    IpNet::new(address.parse::<IpAddr>().ok()?, length).ok()
}

/// Returns the first address of a subnet, the default gateway.
pub(crate) fn first_host(net: IpNet) -> Option<IpAddr> {
    match net.network() {
        IpAddr::V4(network) => Some(Ipv4Addr::from(u32::from(network).checked_add(1)?).into()),
        IpAddr::V6(network) => Some(Ipv6Addr::from(u128::from(network).checked_add(1)?).into()),
    }
}

/// For `deserialize_with`: like [`parse`].
///
/// # Errors
/// The text is not a network.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text)
        .ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not an address with a prefix length")))
}

/// Like [`deserialize`], for a list.
///
/// # Errors
/// One of the texts is not a network.
pub(crate) fn deserialize_all<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    #[derive(Deserialize)]
    struct Written(#[serde(deserialize_with = "deserialize")] IpNet);
    Ok(Vec::<Written>::deserialize(deserializer)?.into_iter().map(|written| written.0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_that_go_refuses_are_refused() {
        for (text, same) in
            [("10.3.0.7/24", "10.3.0.7/24"), ("fd00::7/64", "fd00::7/64"), ("10.3.0.0/024", "10.3.0.0/24")]
        {
            assert_eq!(parse(text).map(|net| net.to_string()), Some(same.to_owned()), "{text}");
        }
        for text in [
            "010.3.0.0/24",
            "10.03.0.0/24",
            "10.3.0.0",
            "10.3.0.0/",
            "10.3.0.0/33",
            "10.3.0.0/+8",
            "10.3.0.0/-1",
            "10.3.0/24",
            "fd00::/129",
            " 10.3.0.0/24",
            "10.3.0.0/24 ",
            "fd00::1%eth0/64",
            "/24",
            "10.3.0.0/0008",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
