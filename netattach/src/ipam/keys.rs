//! Reads the keys of a plugin's configuration one by one, with errors that name them. Pure.
//!
//! Every kind of IPAM reads its configuration with [`ConfigObject`], so that all report errors alike.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::budget::{self, Budget, Exceeded};
use crate::{cidr, cni};

/// A key cannot be used. Every variant but the first names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A size limit is exceeded.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// A required key is missing.
    #[error("{key} is missing")]
    Missing {
        /// Path of the key.
        key: String,
    },
    /// A value has the wrong JSON type.
    #[error("{key} must be {expected}")]
    Type {
        /// Path of the key.
        key: String,
        /// The required type, with its article.
        expected: &'static str,
    },
    /// A text is not an address.
    #[error("{key}: {value:?} is not an IP address")]
    Address {
        /// Path of the key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A text is not a network.
    #[error("{key}: {value:?} is not a network such as 10.1.0.0/16")]
    Network {
        /// Path of the key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A text is not an address with a prefix length.
    #[error("{key}: {value:?} is not an address with a prefix length such as 10.1.0.7/16")]
    NoPrefix {
        /// Path of the key.
        key: String,
        /// Its value.
        value: String,
    },
    /// An object has an invalid member.
    #[error("{key}: {reason}")]
    Member {
        /// Path of the object.
        key: String,
        /// The problem.
        reason: String,
    },
    /// A relative path, which would depend on the directory in which the process was started.
    #[error("{key}: {path} is not an absolute path")]
    RelativePath {
        /// Path of the key.
        key: String,
        /// Its value.
        path: PathBuf,
    },
}

/// Whether a result of this CNI version can carry several addresses of one family. An absent version is 0.1.0.
pub(super) fn holds_many_addresses(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(0)), Some(Ok(minor))) => minor >= 3,
        (Some(Ok(major)), _) => major > 0,
        _ => false,
    }
}

/// Parses `10.0.0.5` or `10.0.0.5/24`; the prefix length is ignored as the Go plugins do.
pub(super) fn address_without_prefix(key: &str, text: &str) -> Result<IpAddr, KeyError> {
    let address = match cidr::parse(text) {
        Some(network) => network.addr(),
        None => parse_address(key, text)?,
    };
    Ok(address.to_canonical())
}

pub(super) fn parse_address(key: &str, text: &str) -> Result<IpAddr, KeyError> {
    text.parse().map_err(|_| KeyError::Address { key: key.to_owned(), value: text.to_owned() })
}

fn parse_network(key: &str, text: &str) -> Result<IpNet, KeyError> {
    cidr::parse(text).ok_or_else(|| KeyError::Network { key: key.to_owned(), value: text.to_owned() })
}

/// Returns all addresses that the pod or the runtime requests, whichever of them takes effect.
pub(super) fn all_asked(config: &Map<String, Value>, args: &cni::CniArgs) -> Result<Vec<IpAddr>, KeyError> {
    let of_args = args.get("IP").unwrap_or_default().split(',').map(str::trim);
    let of_args = of_args.filter(|text| !text.is_empty());
    let mut asked: Vec<IpAddr> =
        of_args.map(|text| address_without_prefix("IP of CNI_ARGS", text)).collect::<Result<_, _>>()?;
    for item in ConfigObject::root(config).asked_ips()?.iter().flatten() {
        asked.push(address_without_prefix(&item.key, item.text()?)?);
    }
    Ok(asked)
}

/// A JSON object and its path, for messages. `null` counts as absent, as in Go.
pub(super) struct ConfigObject<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

/// A value and its path.
pub(super) struct Item<'a> {
    pub(super) key: String,
    value: &'a Value,
}

impl<'a> ConfigObject<'a> {
    /// The whole configuration, as a plugin reads it from standard input.
    pub(super) fn root(config: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), map: config }
    }

    fn get(&self, name: &str) -> Option<Item<'a>> {
        let value = self.map.get(name).filter(|value| !value.is_null())?;
        let key = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        Some(Item { key, value })
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, KeyError> {
        self.get(name).map(|item| item.text()).transpose()
    }

    /// `true` or `false`; absent counts as `false`.
    pub(super) fn flag(&self, name: &str) -> Result<bool, KeyError> {
        Ok(self.switch(name)?.unwrap_or_default())
    }

    /// `true` or `false`; `None` if absent.
    pub(super) fn switch(&self, name: &str) -> Result<Option<bool>, KeyError> {
        let Some(item) = self.get(name) else { return Ok(None) };
        item.value.as_bool().map(Some).ok_or_else(|| item.wrong_type("true or false"))
    }

    /// A number of 32 bits.
    pub(super) fn number(&self, name: &str) -> Result<Option<u32>, KeyError> {
        let Some(item) = self.get(name) else { return Ok(None) };
        let number = item.value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.map(Some).ok_or_else(|| item.wrong_type("a number from 0 to 4294967295"))
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<ConfigObject<'a>>, KeyError> {
        self.get(name).map(|item| item.object()).transpose()
    }

    /// The text of a required key, and the key's path.
    pub(super) fn needed_text(&self, name: &str) -> Result<(String, &'a str), KeyError> {
        let item = self.get(name).ok_or_else(|| self.missing(name))?;
        let text = item.text()?;
        Ok((item.key, text))
    }

    /// The object of a required key.
    pub(super) fn needed_object(&self, name: &str) -> Result<ConfigObject<'a>, KeyError> {
        self.object(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn items(&self, name: &str) -> Result<impl Iterator<Item = Item<'a>> + use<'a>, KeyError> {
        let list = self.get(name).map(|item| item.list()).transpose()?;
        Ok(list.into_iter().flatten())
    }

    /// The items of a list whose length is within the budget.
    pub(super) fn few(
        &self,
        name: &str,
        budget: &Budget,
    ) -> Result<impl Iterator<Item = Item<'a>> + use<'a>, KeyError> {
        let found = self.map.get(name).and_then(Value::as_array).map_or(0, Vec::len);
        budget.check(found)?;
        self.items(name)
    }

    pub(super) fn path(&self, name: &str) -> Result<Option<PathBuf>, KeyError> {
        let Some(item) = self.get(name) else { return Ok(None) };
        let path = PathBuf::from(item.text()?);
        budget::PATH.check(path.as_os_str().len())?;
        budget::FILE_NAME.check(path.iter().map(|part| part.len()).max().unwrap_or(0))?;
        match path.as_os_str().is_empty() {
            true => Ok(None),
            false if path.is_absolute() => Ok(Some(path)),
            false => Err(KeyError::RelativePath { key: item.key, path }),
        }
    }

    pub(super) fn address(&self, name: &str) -> Result<Option<IpAddr>, KeyError> {
        let Some(item) = self.get(name) else { return Ok(None) };
        match item.text()? {
            // Go's net.IP reads an empty string as no address.
            "" => Ok(None),
            text => parse_address(&item.key, text).map(Some),
        }
    }

    /// The network of a required key. Host bits are kept.
    pub(super) fn network(&self, name: &str) -> Result<IpNet, KeyError> {
        let item = self.get(name).ok_or_else(|| self.missing(name))?;
        parse_network(&item.key, item.text()?)
    }

    /// The `routes` of the section, as configured. Each is valid as a [`cni::Route`].
    pub(super) fn routes(&self) -> Result<Vec<Map<String, Value>>, KeyError> {
        self.few("routes", &budget::ROUTES)?.map(|item| item.route().map(|(raw, _)| raw)).collect()
    }

    /// The `routes` of the section, parsed.
    pub(super) fn parsed_routes(&self) -> Result<Vec<cni::Route>, KeyError> {
        self.few("routes", &budget::ROUTES)?.map(|item| item.route().map(|(_, route)| route)).collect()
    }

    /// The `dns` of the section.
    pub(super) fn dns(&self) -> Result<cni::Dns, KeyError> {
        let Some(item) = self.get("dns") else { return Ok(cni::Dns::default()) };
        item.object()?;
        let dns: cni::Dns = item.read()?;
        for list in [&dns.nameservers, &dns.search, &dns.options] {
            budget::DNS.check(list.len())?;
        }
        Ok(dns)
    }

    /// `ips` of `args.cni` and of `runtimeConfig`: the requests of the pod's author and of the runtime.
    pub(super) fn asked_ips(&self) -> Result<[Vec<Item<'a>>; 2], KeyError> {
        let args = match self.object("args")? {
            Some(args) => args.object("cni")?,
            None => None,
        };
        let ips = |holder: Option<ConfigObject<'a>>| -> Result<Vec<Item<'a>>, KeyError> {
            holder.map_or(Ok(Vec::new()), |holder| Ok(holder.few("ips", &budget::IPS)?.collect()))
        };
        Ok([ips(args)?, ips(self.object("runtimeConfig")?)?])
    }

    fn missing(&self, name: &str) -> KeyError {
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) };
        KeyError::Missing { key: path }
    }
}

impl<'a> Item<'a> {
    fn wrong_type(&self, expected: &'static str) -> KeyError {
        KeyError::Type { key: self.key.clone(), expected }
    }

    pub(super) fn text(&self) -> Result<&'a str, KeyError> {
        self.value.as_str().ok_or_else(|| self.wrong_type("a string"))
    }

    pub(super) fn object(&self) -> Result<ConfigObject<'a>, KeyError> {
        let map = self.value.as_object().ok_or_else(|| self.wrong_type("an object"))?;
        Ok(ConfigObject { path: self.key.clone(), map })
    }

    pub(super) fn list(&self) -> Result<impl Iterator<Item = Item<'a>> + use<'a>, KeyError> {
        let values = self.value.as_array().ok_or_else(|| self.wrong_type("a list"))?;
        let key = self.key.clone();
        Ok(values.iter().enumerate().map(move |(i, value)| Item { key: format!("{key}[{i}]"), value }))
    }

    /// An address with a prefix length. Host bits are kept.
    pub(super) fn network(&self) -> Result<IpNet, KeyError> {
        parse_network(&self.key, self.text()?)
    }

    /// A network, or an address as a host network. Host bits are cleared.
    pub(super) fn network_or_address(&self) -> Result<IpNet, KeyError> {
        match self.text()?.parse::<IpAddr>() {
            Ok(address) => Ok(IpNet::from(address.to_canonical())),
            Err(_) => self.network().map(|network| network.trunc()),
        }
    }

    /// A route as configured, and parsed.
    fn route(&self) -> Result<(Map<String, Value>, cni::Route), KeyError> {
        let route = self.object()?;
        route.network("dst")?;
        route.address("gw")?;
        Ok((route.map.clone(), self.read()?))
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, KeyError> {
        T::deserialize(self.value)
            .map_err(|error| KeyError::Member { key: self.key.clone(), reason: error.to_string() })
    }
}
