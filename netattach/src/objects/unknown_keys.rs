//! Objects whose unknown keys are reported.
//!
//! An unknown key may have narrowed the keys next to it, so its name is kept. serde's `flatten` keeps it too, but
//! copies every key and value of the object, which takes most of the time needed to read a large policy.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, Visitor};

use super::budget::shown;

/// A key of an object.
pub(crate) enum Key {
    Known(&'static str),
    Unknown(String),
}

/// Reads a key: one of these, or unknown.
pub(crate) struct Keys(pub(crate) &'static [&'static str]);

impl<'de> DeserializeSeed<'de> for Keys {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Keys {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Key, E> {
        let known = self.0.iter().find(|known| **known == name);
        Ok(known.map_or_else(|| Key::Unknown(shown(name)), |known| Key::Known(known)))
    }
}

/// Implements `Deserialize` for a struct of optional fields and a set `unknown`: `keyed!(Name { "key" => field, ...
/// })`, with `; required "key" => field` for a required field.
macro_rules! keyed {
    ($type:ident { $($key:literal => $field:ident),+ $(,)? } $(; required $needed:literal => $by:ident)?) => {
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Object;

                impl<'de> serde::de::Visitor<'de> for Object {
                    type Value = $type;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<$type, A::Error> {
                        use $crate::objects::unknown_keys::{Key, Keys};
                        let mut object = $type::default();
                        while let Some(key) = map.next_key_seed(Keys(&[$($key),+]))? {
                            match key {
                                $(Key::Known($key) => object.$field = map.next_value()?,)+
                                Key::Known(_) => {
                                    map.next_value::<serde::de::IgnoredAny>()?;
                                }
                                Key::Unknown(name) => {
                                    map.next_value::<serde::de::IgnoredAny>()?;
                                    if object.unknown.len() < $crate::objects::budget::UNKNOWN_KEYS {
                                        object.unknown.insert(name);
                                    }
                                }
                            }
                        }
                        $(if object.$by.is_none() {
                            return Err(<A::Error as serde::de::Error>::missing_field($needed));
                        })?
                        Ok(object)
                    }
                }

                deserializer.deserialize_map(Object)
            }
        }
    };
}

pub(crate) use keyed;
